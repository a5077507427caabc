"""What one process of ``benchmarks.torch_compile.guarantees`` does: a program by the backend, and whether
what it gave is right.

Every check returns what it found; under ``wrong`` stands whatever should not be.  ``small`` is for
trying them in Triton's interpreter.
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

from benchmarks.torch_compile.model_process import nostall_backend

if TYPE_CHECKING:
    from nostall.attach.torch_compile.backend import Backend

ALWAYS = {"nostall.choose": "stitched"}
FP8 = ("float8_e4m3fn", "float8_e5m2")
SIZES = (2048, 2047, 1536, 1024, 777, 4096, 2, 3000)
"""Of a batch that varies."""
LIMIT_S = 60.0
"""Until the backend has chosen."""
Found = dict[str, Any]


class Run:
    """A function by a backend of its own."""

    def __init__(self, function: Callable[..., Any], device: str, **options: Any) -> None:
        torch._dynamo.reset()
        self.backend: Backend = nostall_backend(device)
        race = {} if device == "cuda" else {"tuned_plans": 0, "fallback": "eager"}
        named = {x if "." in x else f"nostall.{x}": v for x, v in {**race, **options}.items()}
        self.function = torch.compile(function, backend=self.backend, options=named)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def kernels(self) -> int:
        return sum(report.kernels for report in self.backend.reports)

    @property
    def told(self) -> list[str]:
        return [report.explain() for report in self.backend.reports]

    @property
    def chosen(self) -> bool:
        return all(report.reason for report in self.backend.reports)


def fp8(device: str, small: bool, place: Path) -> Found:
    """Norms with results in fp8: every value is PyTorch's or its neighbour, and as often another
    one as by Inductor."""
    wrong, shares = [], {}
    rows, columns = (6, 24) if small else (4096, 5000)
    for name in FP8:
        dtype = getattr(torch, name)

        def quantised(x: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
            y = F.layer_norm(x, x.shape[-1:])
            scale = 400 / y.abs().amax(-1, keepdim=True).float()
            return (y.float() * scale).to(dtype), scale

        for wide in ("float32", "float16", "bfloat16")[: 2 if small else 3]:
            torch.manual_seed(0)
            x = torch.randn(rows, columns, device=device, dtype=getattr(torch, wide))
            run = Run(quantised, device, choose="stitched")
            torch.cuda.empty_cache()
            values, _ = run(x)
            exact = quantised(x.double())[0]
            found = {"nostall": values, "eager": quantised(x)[0]}
            if device == "cuda":
                found["inductor"] = torch.compile(quantised)(x)[0]
            counts = {who: far(value, exact) for who, value in found.items()}
            shares[f"{name} of {wide}"] = {who: share for who, (share, _) in counts.items()}
            worst = max(share for who, (share, _) in counts.items() if who != "nostall")
            if run.kernels < 1:
                wrong.append(f"{name} of {wide}: nothing was stitched")
            if counts["nostall"][1] > 1 or counts["nostall"][0] > 1.1 * worst + 1e-3:
                wrong.append(f"{name} of {wide}: {counts}")
    return {"share of values that are not those of fp64": shares, "wrong": wrong}


def far(values: Tensor, exact: Tensor) -> tuple[float, int]:
    """The share of values that are not the exact ones, and how many steps the farthest is off."""
    places = [x.view(torch.uint8).short() for x in (values, exact)]
    # Ordered as the numbers are.
    ordered = [torch.where(x > 127, 127 - x, x) for x in places]
    steps = (ordered[0] - ordered[1]).abs()
    return float((steps > 0).double().mean()), int(steps.max())


def dropout(device: str, small: bool, place: Path) -> Found:
    """Masks of forward and backward passes, of equal seeds, of the steps and of replays of a CUDA
    graph, Inductor's and the user's."""
    rows, columns = (6, 24) if small else (4096, 1000)

    def function(x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x, x.shape[-1:]), 0.25)

    wrong, kernels = [], {}
    modes: dict[str, Any] = {"stream": {}}
    if device == "cuda":
        modes["Inductor's CUDA graphs"] = {"triton.cudagraphs": True}
    for name, options in modes.items():
        run = Run(function, device, choose="stitched", **options)

        def masked(run: Run = run) -> tuple[Tensor, Tensor]:
            x = torch.linspace(-1, 1, columns, device=device).repeat(rows, 1).requires_grad_()
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            y = run(x)
            mask = (y != 0).clone()
            # The gradient of the norm is 0 where nothing was kept, and only for the sum.
            (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
            return mask, gradient.clone()

        seeded = []
        for seed in (1, 1, 2, 3, 3):
            torch.manual_seed(seed)
            seeded.append(masked())
        free = [masked()[0] for _ in range(3)]
        kernels[name] = run.kernels
        kept = float(free[0].float().mean())
        told = {
            "nothing was stitched": run.kernels < 1,
            "another mask for the same seed": not torch.equal(seeded[3][0], seeded[4][0]),
            "another gradient for the same seed": not torch.equal(seeded[3][1], seeded[4][1]),
            "the mask of another seed": torch.equal(seeded[2][0], seeded[3][0]),
            "the same mask twice": any(map(torch.equal, free, free[1:])),
            f"{kept:.1%} are kept": not small and abs(kept - 0.75) > 0.002,
        }
        wrong += [f"{name}: {text}" for text, is_so in told.items() if is_so]
    wrong += passes(device, rows, columns)
    if device == "cuda":
        wrong += replays(function, rows, columns)
    return {"kernels": kernels, "wrong": wrong}


def passes(device: str, rows: int, columns: int) -> list[str]:
    """Where the mask is all that there is between input and result, the gradient shows it."""
    run = Run(lambda x: F.dropout(x * 2, 0.25), device, choose="stitched", fuse="all")
    x = torch.ones(rows, columns, device=device, requires_grad=True)
    y = run(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    wrong = [] if run.kernels else ["dropout alone: nothing was stitched"]
    same = torch.equal(y != 0, gradient != 0)
    return wrong if same else [*wrong, "another mask in the backward pass"]


def replays(function: Callable[[Tensor], Tensor], rows: int, columns: int) -> list[str]:
    """Of a CUDA graph that the user captures."""
    run = Run(function, "cuda", choose="stitched")
    x = torch.linspace(-1, 1, columns, device="cuda").repeat(rows, 1)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = run(x)
        masks = []
        for _ in range(4):
            graph.replay()
            masks.append((made != 0).clone())
    repeated = any(map(torch.equal, masks, masks[1:]))
    return ["a replay of the user's CUDA graph repeats a mask"] if repeated else []


class Feed(nn.Module):
    """A feed-forward block with dropout, and the norm behind the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def bits(device: str, small: bool, place: Path) -> Found:
    """Two blocks with dropout, as they train: digests of the result and of all gradients, for two
    seeds, once the graph has chosen."""
    width, rows = (24, 6) if small else (3000, 8192)
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.bfloat16
    module = nn.Sequential(Feed(width), Feed(width)).to(device, dtype).train()
    x = torch.randn(rows, width).to(device, dtype)
    run = Run(module, device)

    def step(seed: int) -> str:
        torch.manual_seed(seed)
        return digest(gradients(run, module, x))

    first = step(1)
    end = time.perf_counter() + LIMIT_S
    while not run.chosen and time.perf_counter() < end:
        step(1)
    (report,) = run.backend.reports
    digests = [step(1), step(2), step(1)]
    told = {
        "nothing was chosen": not run.chosen,
        "other bits in another step": digests[0] != digests[2],
        "the same bits for another seed": digests[0] == digests[1],
    }
    return {
        "digests": digests,
        "of the first step": first,
        "told": str(report),
        "from store": report.from_store,
        "wrong": [text for text, is_so in told.items() if is_so],
    }


def digest(values: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def large(device: str, small: bool, place: Path) -> Found:
    """A tensor of more than 2^31 elements, at once and behind a smaller batch of the same graph;
    what kernels cannot count runs by Inductor."""
    columns, above = (64, 40) if small else (1024, 2**21 + 3)
    if small:
        from nostall.attach.torch_compile.rewrite import matching

        matching.MAX_ELEMENTS = 32 * columns

    def function(x: Tensor) -> Tensor:
        return (x * 2).softmax(-1)

    wrong, told = [], {}
    for name, batches in {"at once": (above,), "behind smaller ones": (16, 24, 16, above)}.items():
        run = Run(function, device, choose="stitched", fuse="all")
        for rows in batches:
            torch.manual_seed(0)
            x = torch.randn(rows, columns, device=device, dtype=torch.float16)
            if len(batches) > 1:
                torch._dynamo.mark_dynamic(x, 0)
            with torch.no_grad():
                found = run(x)
            if not alike(found, x, function):
                wrong.append(f"{name}: {rows} rows differ")
            del found, x
            if device == "cuda":
                torch.cuda.empty_cache()
        told[name] = run.told
        *before, last = run.backend.reports
        counted = "more than 2^31 - 1 elements" in last.explain()
        if not small and (last.kernels or not counted):
            wrong.append(f"{name}: {last}")
        wrong += [f"{name}: {one}" for one in before if not one.kernels]
    return {"told": told, "wrong": wrong}


def alike(found: Tensor, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
    """Every row, a few at a time, those at the end among them."""
    step = 2**16
    with torch.no_grad():
        return all(
            torch.allclose(found[at : at + step], function(x[at : at + step]), 1e-2, 1e-6)
            for at in range(0, len(x), step)
        )


def varying(device: str, small: bool, place: Path) -> Found:
    """A model that trains with batches of many sizes: compiled once, stitched behind the first
    step, right at every size."""
    width = 24 if small else 3000
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width), nn.Softmax(-1))
    module = module.to(device)
    run = Run(module, device)
    states, apart = [], []
    every = [max(2, size // (200 if small else 1)) for size in SIZES]

    def step(size: int) -> None:
        given = torch.randn(size, width, device=device, requires_grad=True)
        torch._dynamo.mark_dynamic(given, 0)
        found, wanted = gradients(run, module, given), gradients(module, module, given)
        states.append(run.backend.reports[-1].state)
        apart.append(max(distance(a, b) for a, b in zip(found, wanted, strict=True)))

    def until_chosen(sizes: Sequence[int]) -> None:
        end = time.perf_counter() + LIMIT_S
        for size in itertools.cycle(sizes):
            step(size)
            if run.chosen or time.perf_counter() > end:
                return

    until_chosen(every[:2])
    for size in every:
        step(size)
    # PyTorch may have compiled again for some of them, and these graphs have to choose, too.
    until_chosen(every)
    wrong = [] if max(apart) < 1e-3 else [f"apart by {max(apart)}"]
    compiled = {"nostall": len(run.backend.reports)}
    if device == "cuda":
        compiled["inductor"] = compilations(module, every, width)
        if compiled["nostall"] > compiled["inductor"]:
            wrong.append(f"compiled {compiled} times")
    if states[0] != "inductor" or not run.chosen:
        last = [report.state for report in run.backend.reports]
        wrong.append(f"{states[0]} first, {', '.join(last)} last")
    return {"told": run.told, "compiled": compiled, "apart": max(apart), "wrong": wrong}


def compilations(module: nn.Module, sizes: Sequence[int], width: int) -> int:
    """How often torch.compile compiles for these batches."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    run = torch.compile(module)
    for size in sizes:
        given = torch.randn(size, width, device="cuda", requires_grad=True)
        torch._dynamo.mark_dynamic(given, 0)
        gradients(run, module, given)
    return int(counters["stats"]["unique_graphs"] - before)


def gradients(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and what all inputs' gradients are."""
    module.zero_grad()
    x.grad = None
    y = run(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    every = (p.grad for p in (x, *module.parameters()))
    return [y.detach(), *(gradient.clone() for gradient in every if gradient is not None)]


def distance(one: Tensor, other: Tensor) -> float:
    scale = float(other.double().square().mean().sqrt()) or 1.0
    return float((one.double() - other.double()).square().mean().sqrt()) / scale
