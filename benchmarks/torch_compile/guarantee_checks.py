"""Checks of the torch.compile backend that run in one process, for the guarantees benchmark.

Every check returns a record; its ``wrong`` lists the failures.  ``small`` selects sizes for
Triton's interpreter.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.torch_compile.model_program import nostall_backend

if TYPE_CHECKING:
    from nostall.attach.torch_compile.backend import Backend

FP8 = ("float8_e4m3fn", "float8_e5m2")
SIZES = (2048, 2047, 1536, 1024, 777, 4096, 2, 3000)
"""Batch sizes of the check with a dynamic batch."""
LIMIT_S = 60.0
"""Seconds within which the backend has to choose."""
Result = dict[str, Any]


class CompiledFunction:
    """A function compiled with its own instance of the backend."""

    def __init__(self, function: Callable[..., Any], device: str, **options: Any) -> None:
        torch._dynamo.reset()
        self.backend: Backend = nostall_backend(device)
        tuning = {} if device == "cuda" else {"tuned_plans": 0, "fallback": "eager"}
        prefixed_options = {
            name if "." in name else f"nostall.{name}": value
            for name, value in {**tuning, **options}.items()
        }
        self.function = torch.compile(function, backend=self.backend, options=prefixed_options)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def kernels(self) -> int:
        return sum(report.kernels for report in self.backend.reports)

    @property
    def explanations(self) -> list[str]:
        return [report.explain() for report in self.backend.reports]

    @property
    def has_chosen(self) -> bool:
        return all(report.reason for report in self.backend.reports)


def check_fp8(device: str, small: bool, folder: Path) -> Result:
    """Check norms with fp8 results against fp64.

    Every value may be off by one fp8 step, and not more values than with eager PyTorch or Inductor.
    """
    wrong, shares = [], {}
    rows, columns = (6, 24) if small else (4096, 5000)
    for name in FP8:
        dtype = getattr(torch, name)

        def quantised(x: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
            y = F.layer_norm(x, x.shape[-1:])
            scale = 400 / y.abs().amax(-1, keepdim=True).float()
            return (y.float() * scale).to(dtype), scale

        for input_dtype in ("float32", "float16", "bfloat16")[: 2 if small else 3]:
            torch.manual_seed(0)
            x = torch.randn(rows, columns, device=device, dtype=getattr(torch, input_dtype))
            run = CompiledFunction(quantised, device, choose="stitched")
            torch.cuda.empty_cache()
            values, _ = run(x)
            exact = quantised(x.double())[0]
            results = {"nostall": values, "eager": quantised(x)[0]}
            if device == "cuda":
                results["inductor"] = torch.compile(quantised)(x)[0]
            errors = {source: fp8_error(value, exact) for source, value in results.items()}
            shares[f"{name} of {input_dtype}"] = {
                source: share for source, (share, _) in errors.items()
            }
            worst_baseline = max(
                share for source, (share, _) in errors.items() if source != "nostall"
            )
            if run.kernels < 1:
                wrong.append(f"{name} of {input_dtype}: no kernel was generated")
            if errors["nostall"][1] > 1 or errors["nostall"][0] > 1.1 * worst_baseline + 1e-3:
                wrong.append(f"{name} of {input_dtype}: {errors}")
    return {"share of values that are not those of fp64": shares, "wrong": wrong}


def fp8_error(values: Tensor, exact: Tensor) -> tuple[float, int]:
    """Share of values that differ from the exact ones, and the largest difference in fp8 steps."""
    encodings = [x.view(torch.uint8).short() for x in (values, exact)]
    # Map the encodings to integers in the order of the numbers.
    ordered = [torch.where(x > 127, 127 - x, x) for x in encodings]
    steps = (ordered[0] - ordered[1]).abs()
    return float((steps > 0).double().mean()), int(steps.max())


def check_dropout(device: str, small: bool, folder: Path) -> Result:
    """Check dropout masks: forward and backward, equal seeds, steps, and CUDA graph replays.

    CUDA graphs are Inductor's and the user's.
    """
    rows, columns = (6, 24) if small else (4096, 1000)

    def function(x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x, x.shape[-1:]), 0.25)

    wrong, kernels = [], {}
    modes: dict[str, Any] = {"stream": {}}
    if device == "cuda":
        modes["Inductor's CUDA graphs"] = {"triton.cudagraphs": True}
    for name, options in modes.items():
        run = CompiledFunction(function, device, choose="stitched", **options)

        def masked(run: CompiledFunction = run) -> tuple[Tensor, Tensor]:
            x = torch.linspace(-1, 1, columns, device=device).repeat(rows, 1).requires_grad_()
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            y = run(x)
            mask = (y != 0).clone()
            # A random gradient, because the norm's gradient of a plain sum is 0.
            (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
            return mask, gradient.clone()

        seeded_results = []
        for seed in (1, 1, 2, 3, 3):
            torch.manual_seed(seed)
            seeded_results.append(masked())
        unseeded_masks = [masked()[0] for _ in range(3)]
        kernels[name] = run.kernels
        kept_share = float(unseeded_masks[0].float().mean())
        failures = {
            "nothing was stitched": run.kernels < 1,
            "another mask for the same seed": not torch.equal(
                seeded_results[3][0], seeded_results[4][0]
            ),
            "another gradient for the same seed": not torch.equal(
                seeded_results[3][1], seeded_results[4][1]
            ),
            "the mask of another seed": torch.equal(seeded_results[2][0], seeded_results[3][0]),
            "the same mask twice": any(map(torch.equal, unseeded_masks, unseeded_masks[1:])),
            f"{kept_share:.1%} of the elements are kept": not small
            and abs(kept_share - 0.75) > 0.002,
        }
        wrong += [f"{name}: {text}" for text, has_failed in failures.items() if has_failed]
    wrong += check_backward_mask(device, rows, columns)
    if device == "cuda":
        wrong += check_replayed_masks(function, rows, columns)
    return {"kernels": kernels, "wrong": wrong}


def check_backward_mask(device: str, rows: int, columns: int) -> list[str]:
    """Check that both passes of a function that is only dropout use the same mask."""
    run = CompiledFunction(lambda x: F.dropout(x * 2, 0.25), device, choose="stitched", fuse="all")
    x = torch.ones(rows, columns, device=device, requires_grad=True)
    y = run(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    failures = [] if run.kernels else ["dropout alone: nothing was stitched"]
    is_same = torch.equal(y != 0, gradient != 0)
    return failures if is_same else [*failures, "another mask in the backward pass"]


def check_replayed_masks(
    function: Callable[[Tensor], Tensor], rows: int, columns: int
) -> list[str]:
    """Check that replays of a CUDA graph that the user captures draw new masks."""
    run = CompiledFunction(function, "cuda", choose="stitched")
    x = torch.linspace(-1, 1, columns, device="cuda").repeat(rows, 1)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run(x)
        masks = []
        for _ in range(4):
            graph.replay()
            masks.append((output != 0).clone())
    is_repeated = any(map(torch.equal, masks, masks[1:]))
    return ["a replay of the user's CUDA graph repeats a mask"] if is_repeated else []


class FeedForward(nn.Module):
    """A feed-forward block with dropout, residual and post-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def check_bits(device: str, small: bool, folder: Path) -> Result:
    """Check that training steps are bitwise reproducible after the choice.

    The record has digests of the result and all gradients of two blocks with dropout, for two
    seeds.
    """
    width, rows = (24, 6) if small else (3000, 8192)
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    module = nn.Sequential(FeedForward(width), FeedForward(width)).to(device, dtype).train()
    x = torch.randn(rows, width).to(device, dtype)
    run = CompiledFunction(module, device)

    def step(seed: int) -> str:
        torch.manual_seed(seed)
        return digest(result_and_gradients(run, module, x))

    first_digest = step(1)
    deadline = time.perf_counter() + LIMIT_S
    while not run.has_chosen and time.perf_counter() < deadline:
        step(1)
    (report,) = run.backend.reports
    digests = [step(1), step(2), step(1)]
    failures = {
        "nothing was chosen": not run.has_chosen,
        "other bits in another step": digests[0] != digests[2],
        "the same bits for another seed": digests[0] == digests[1],
    }
    return {
        "digests": digests,
        "of the first step": first_digest,
        "told": str(report),
        "from store": report.from_store,
        "wrong": [text for text, has_failed in failures.items() if has_failed],
    }


def digest(values: Sequence[Tensor]) -> str:
    """SHA-256 of the bytes of all tensors."""
    sha256 = hashlib.sha256()
    for value in values:
        sha256.update(value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha256.hexdigest()


def check_large_tensor(device: str, small: bool, folder: Path) -> Result:
    """Check a tensor of more than 2^31 elements, which Inductor must run.

    It is the first batch, or comes after smaller batches of the same graph.
    """
    columns, rows_above_limit = (64, 40) if small else (1024, 2**21 + 3)
    if small:
        from nostall.attach.torch_compile.rewrite import matching

        matching.MAX_ELEMENTS = 32 * columns

    def function(x: Tensor) -> Tensor:
        return (x * 2).softmax(-1)

    wrong, explanations = [], {}
    for name, batches in {
        "at once": (rows_above_limit,),
        "behind smaller ones": (16, 24, 16, rows_above_limit),
    }.items():
        run = CompiledFunction(function, device, choose="stitched", fuse="all")
        for rows in batches:
            torch.manual_seed(0)
            x = torch.randn(rows, columns, device=device, dtype=torch.float16)
            if len(batches) > 1:
                torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad():
                output = run(x)
            if not rows_match(output, x, function):
                wrong.append(f"{name}: {rows} rows differ")
            del output, x
            if device == "cuda":
                torch.cuda.empty_cache()
        explanations[name] = run.explanations
        *earlier, last = run.backend.reports
        has_reason = "more than 2^31 - 1 elements" in last.explain()
        if not small and (last.kernels or not has_reason):
            wrong.append(f"{name}: {last}")
        wrong += [f"{name}: {report}" for report in earlier if not report.kernels]
    return {"told": explanations, "wrong": wrong}


def rows_match(output: Tensor, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
    """Whether all rows equal those of ``function``, compared in blocks of rows."""
    step = 2**16
    with torch.no_grad():
        return all(
            torch.allclose(
                output[start : start + step], function(x[start : start + step]), 1e-2, 1e-6
            )
            for start in range(0, len(x), step)
        )


def check_dynamic_batch(device: str, small: bool, folder: Path) -> Result:
    """Check training with a dynamic batch: few compilations, correct at every size.

    The first step must run Inductor's version, and the backend must choose for all graphs.
    """
    width = 24 if small else 3000
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Softmax(-1))
    module = module.to(device)
    run = CompiledFunction(module, device)
    states, differences = [], []
    sizes = [max(2, size // (200 if small else 1)) for size in SIZES]

    def step(size: int) -> None:
        inputs = torch.randn(size, width, device=device, requires_grad=True)
        torch._dynamo.mark_dynamic(inputs, 0)
        results, expected = (
            result_and_gradients(run, module, inputs),
            result_and_gradients(module, module, inputs),
        )
        states.append(run.backend.reports[-1].state)
        differences.append(
            max(relative_difference(a, b) for a, b in zip(results, expected, strict=True))
        )

    def until_chosen(sizes: Sequence[int]) -> None:
        deadline = time.perf_counter() + LIMIT_S
        for size in itertools.cycle(sizes):
            step(size)
            if run.has_chosen or time.perf_counter() > deadline:
                return

    until_chosen(sizes[:2])
    for size in sizes:
        step(size)
    # Dynamo may have compiled again for some sizes; wait for the choice of these graphs.
    until_chosen(sizes)
    wrong = [] if max(differences) < 1e-3 else [f"apart by {max(differences)}"]
    compilation_counts = {"nostall": len(run.backend.reports)}
    if device == "cuda":
        compilation_counts["inductor"] = count_compilations(module, sizes, width)
        if compilation_counts["nostall"] > compilation_counts["inductor"]:
            wrong.append(f"compiled {compilation_counts} times")
    if states[0] != "inductor" or not run.has_chosen:
        last_states = [report.state for report in run.backend.reports]
        wrong.append(f"{states[0]} first, {', '.join(last_states)} last")
    return {
        "told": run.explanations,
        "compiled": compilation_counts,
        "apart": max(differences),
        "wrong": wrong,
    }


def count_compilations(module: nn.Module, sizes: Sequence[int], width: int) -> int:
    """Number of graphs that torch.compile compiles for these batch sizes."""
    torch._dynamo.reset()
    count_before = counters["stats"]["unique_graphs"]
    run = torch.compile(module)
    for size in sizes:
        inputs = torch.randn(size, width, device="cuda", requires_grad=True)
        torch._dynamo.mark_dynamic(inputs, 0)
        result_and_gradients(run, module, inputs)
    return int(counters["stats"]["unique_graphs"] - count_before)


def result_and_gradients(
    run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor
) -> list[Tensor]:
    """The result, and the gradients of the input and all parameters."""
    module.zero_grad()
    x.grad = None
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    all_gradients = (tensor.grad for tensor in (x, *module.parameters()))
    return [y.detach(), *(gradient.clone() for gradient in all_gradients if gradient is not None)]


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference / that of ``expected``."""
    scale = float(expected.double().square().mean().sqrt()) or 1.0
    return float((actual.double() - expected.double()).square().mean().sqrt()) / scale
