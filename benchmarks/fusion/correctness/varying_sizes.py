"""Do programs whose sizes vary get kernels, right numbers and no compilation for each size?

    python -m benchmarks run torch_compile.varying_sizes --out OUT [--programs A,B] [--sizes 12]
        [--seconds 0.3] [--choose measure] [--device cpu]

Each program has sizes that vary, marked as dynamic or with ``dynamic=True``.  The kernels are
selected without a choice, unless ``--choose measure`` asks for one.  Results (of training programs
also gradients) are compared with PyTorch in fp64 at random sizes; the errors of torch.compile and
of eager PyTorch are beside.  On a GPU the program is then timed at the first size, and at two that
are 4 times as large and small, in turns with torch.compile, measured twice (the null).  OUT is
saved after each program.

``--device cpu`` runs in Triton's interpreter (set TRITON_INTERPRET=1), with eager PyTorch in place
of Inductor, and without times.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.harness.gpu_lock import gpu_turn
from benchmarks.harness.result_file import load, save
from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.graph_key import device_name
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.core.errors import one_line

F = torch.nn.functional
SHARES_GPU = True
"""Processes of other benchmarks may run beside this one."""
WIDTH = 1024
CHOICE_SECONDS = 60.0
"""Longest wait for a choice."""


@dataclass(frozen=True)
class Program:
    """A program whose sizes vary."""

    make: Callable[[int], Callable[..., Tensor]]
    """Makes the function (or module), for the width of a row."""
    shapes: tuple[tuple[str | int, ...], ...]
    """Axes of each input: names of sizes that vary, ``width``, or numbers."""
    first: dict[str, int]
    """Sizes of the first call."""
    trains: bool = False
    is_marked: bool = True
    """Whether axes are marked as dynamic; else it is compiled with ``dynamic=True``."""
    refused: str = ""
    """Part of the reason why there is no kernel, of programs that have none."""


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.other = nn.RMSNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.other(F.silu(self.norm(x + y)) * y)


class Layer(nn.Module):
    """A layer of a transformer whose length is marked, with products on both sides of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.down(F.gelu(self.up(self.norm(x)))))


def scores(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(x * 0.125 + mask, dim=-1)

    return function


def causal_scores(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-1], device=x.device)
        hidden = at[None, :] > at[:, None]
        return F.softmax(x.float().masked_fill(hidden, float("-inf")), dim=-1).to(x.dtype)

    return function


def rotary(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads behind the length, as projections give them; tables by length."""
        x = F.rms_norm(x, (x.shape[-1],)).transpose(1, 2)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * cos + turned * sin

    return function


def two_parts(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(x, (width,)).square().amax() + F.softmax(y * 2, dim=-1).amax()

    return function


def all_dynamic(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return F.softmax(F.gelu(x) + y, dim=-1)

    return function


def shorter(width: int) -> Callable[..., Tensor]:
    def function(x: Tensor) -> Tensor:
        return F.layer_norm(x[:, 1:], (width,))

    return function


ROWS = ("batch", "length", "width")
FIRST = {"batch": 8, "length": 512}
PROGRAMS: dict[str, Program] = {
    "batch and length": Program(Norm, (ROWS, ROWS), FIRST),
    "batch and length in training": Program(Norm, (ROWS, ROWS), FIRST, trains=True),
    "layer": Program(Layer, (ROWS,), FIRST),
    "layer in training": Program(Layer, (ROWS,), FIRST, trains=True),
    "softmax over a length": Program(
        scores,
        (("batch", 8, "length", "length"), ("batch", 1, 1, "length")),
        {"batch": 4, "length": 500},
    ),
    "causal softmax over a length": Program(
        causal_scores, (("batch", 8, "length", "length"),), {"batch": 4, "length": 500}
    ),
    "softmax over another length": Program(
        scores,
        (("batch", 8, "queries", "keys"), ("batch", 1, 1, "keys")),
        {"batch": 4, "queries": 300, "keys": 700},
    ),
    "rotary heads": Program(
        rotary, (("batch", "length", 16, 64), ("length", 64), ("length", 64)), FIRST
    ),
    "sizes that never meet": Program(
        two_parts, (("rows", "width"), ("others", "width")), {"rows": 4096, "others": 4096}
    ),
    "softmax with dynamic=True": Program(all_dynamic, (ROWS, ROWS), FIRST, is_marked=False),
    "norms with dynamic=True": Program(Norm, (ROWS, ROWS), FIRST, is_marked=False),
    "a part of a length": Program(shorter, (ROWS,), FIRST, refused="no product of dynamic"),
}


def measure(program: Program, options: argparse.Namespace) -> dict[str, Any]:
    """Kernels, compilations and errors of a program at random sizes, and its times on a GPU."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    width, on_cpu = (options.width, options.device == "cpu")
    function = program.make(width)
    if isinstance(function, nn.Module):
        function = function.to(options.device, torch.float32 if on_cpu else torch.bfloat16)
    backend, settings = Backend(), {"nostall.choose": options.choose}
    if on_cpu:
        settings |= {"nostall.fallback": "eager", "nostall.fuse": "all"}
    dynamic = None if program.is_marked else True
    compiled = torch.compile(function, backend=backend, options=settings, dynamic=dynamic)
    plain = function if on_cpu else torch.compile(function, dynamic=dynamic)
    first = {name: max(2, size // options.shrink) for name, size in program.first.items()}
    chooser = random.Random(0)
    sizes = [first]
    for _ in range(options.sizes):
        sizes.append({name: chooser.randint(2, 2 * size) for name, size in first.items()})
    errors, plain_errors, eager_errors, called, plain_graphs = [], [], [], [], 0
    if options.choose == "measure":
        choose(program, compiled, backend, make_inputs(program, first, width, options.device))
    for size in sizes:
        inputs = make_inputs(program, size, width, options.device)
        exact = results(function, [x.double() for x in inputs], program.trains, in_fp64=True)
        with record_calls() as kernels:
            found = results(compiled, inputs, program.trains)
        called.append(len(kernels))
        errors.append(max_error(found, exact))
        known = compilations()
        plain_errors.append(max_error(results(plain, inputs, program.trains), exact))
        plain_graphs += compilations() - known
        eager_errors.append(max_error(results(function, inputs, program.trains), exact))
    result = {
        "sizes": sizes,
        "choices": choices(backend),
        "cpu_seconds": sum(report.cpu_seconds for report in backend.reports),
        "kernels": backend.reports[-1].kernels,
        "called": called,
        "graphs": len(backend.reports),
        "plain_graphs": plain_graphs,
        "error": max(errors),
        "plain_error": max(plain_errors),
        "eager_error": max(eager_errors),
        "not_fused": [
            [*key, n] for report in backend.reports for key, n in report.not_fused.items()
        ],
    }
    if not on_cpu:
        ways = {"inductor": plain, "stitched": compiled}
        result["times"] = times(program, ways, backend, options)
        result["choices"] = choices(backend)
    return result


def choose(
    program: Program, compiled: Callable[..., Tensor], backend: Backend, inputs: list[Tensor]
) -> None:
    """Call a program until the backend has chosen, at most :data:`CHOICE_SECONDS`."""
    end, are_chosen = time.perf_counter() + CHOICE_SECONDS, False
    while not are_chosen and time.perf_counter() < end:
        calls = {id(report): report.calls for report in backend.reports}
        results(compiled, inputs, program.trains)
        # Graphs of other sizes are not called, so nothing chooses for them now.
        are_chosen = all(
            report.reason or report.calls == calls.get(id(report)) for report in backend.reports
        )


def choices(backend: Backend) -> list[str]:
    """The choice of each graph, and those at further sizes."""
    return [text for report in backend.reports for text in (str(report), *report.at_sizes)]


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def make_inputs(program: Program, size: dict[str, int], width: int, device: str) -> list[Tensor]:
    """Random inputs with these sizes; axes that vary are marked."""
    inputs = []
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for axes in program.shapes:
        shape = [{**size, "width": width}[axis] if isinstance(axis, str) else axis for axis in axes]
        value = torch.randn(shape, device=device, dtype=dtype, requires_grad=program.trains)
        for at, axis in enumerate(axes):
            if axis in size and program.is_marked:
                torch._dynamo.mark_dynamic(value, at)
        inputs.append(value)
    return inputs


def results(
    function: Callable[..., Tensor], inputs: list[Tensor], trains: bool, *, in_fp64: bool = False
) -> list[Tensor]:
    """The result, and gradients of the inputs if the program trains."""
    module = function if isinstance(function, nn.Module) else None
    if in_fp64 and module is not None:
        function = copy.deepcopy(module).double()
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs] if in_fp64 else inputs
    result = function(*inputs)
    if not trains:
        return [result.detach()]
    # The mean of a norm's squares would have a gradient of rounding errors only.
    weights = torch.linspace(-1, 1, result.shape[-1], device=result.device, dtype=result.dtype)
    gradients = torch.autograd.grad((result * weights).sum(), inputs)
    return [result.detach(), *gradients]


def max_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error, relative to the largest number of each tensor."""
    pairs = zip(found, exact, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


def times(
    program: Program,
    ways: dict[str, Callable[..., Tensor]],
    backend: Backend,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Times at the first size, and at sizes 4 times as large and small."""
    from nostall.core.measurement import Comparison
    from nostall.gpu.clock import EventClock

    rows = []
    for factor in (1.0, 4.0, 0.25):
        size = dict(program.first)
        name = next(reversed(size))
        size[name] = int(size[name] * factor)
        inputs = make_inputs(program, size, options.width, options.device)
        runs = {
            way: partial(results, function, inputs, program.trains)
            for way, function in ways.items()
        }
        for run in runs.values():
            run()
        if options.choose == "measure":
            choose(program, ways["stitched"], backend, inputs)
            with gpu_turn():  # the second call of a range of sizes compares the versions there
                runs["stitched"]()
        with gpu_turn():
            *samples, null = EventClock().samples(
                "", [*runs.values(), runs["inductor"]], options.seconds
            )
        compared = Comparison.from_samples(*samples, null, kind="measured")
        rows.append(
            {"size": size, "ratio": compared.ratio, "low": compared.low}
            | {"high": compared.high, "null_low": compared.null_low}
            | {"null_high": compared.null_high, "samples_s": [*samples, null]}
        )
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", type=lambda text: text.split(","), default=list(PROGRAMS))
    parser.add_argument("--sizes", type=int, default=12, help="random sizes of each program")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each comparison")
    parser.add_argument("--choose", choices=("stitched", "measure"), default="stitched")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--shrink", type=int, default=1, help="divisor of the first sizes")


def main(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        from tools.interpreters.triton_interpreter import prepare

        prepare()
    result = load(options.out) if options.out.exists() else {"programs": {}}
    for name in options.programs:
        if name in result["programs"]:
            continue
        try:
            found = measure(PROGRAMS[name], options)
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {one_line(error)}"}
        result["programs"][name] = found
        about = {"gpu": device_name(torch.device(options.device)), "torch": torch.__version__}
        save(options.out, choose=options.choose, programs=result["programs"], **about)
        print(summary_line(name, found), flush=True)
    return 0


def summary_line(name: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"{name:30} failed: {found['failed'][:150]}"
    ratios = " ".join(f"{row['ratio']:.2f}" for row in found.get("times", []))
    reasons = sorted({f"{why} ({what})" for why, what, _ in found["not_fused"]})
    called = f"{min(found['called'])}-{max(found['called'])}"
    names = ("error", "plain_error", "eager_error")
    errors = " ".join(f"{found[each]:.1e}" for each in names)
    return (
        f"{name:30} kernels {found['kernels']:2} called {called} graphs {found['graphs']} "
        f"(torch.compile {found['plain_graphs']}) errors "
        f"(kernels, torch.compile, eager) {errors} {ratios} {'; '.join(reasons)[:200]}"
    )


if __name__ == "__main__":
    own = argparse.ArgumentParser(description=__doc__)
    add_options(own)
    sys.exit(main(own.parse_args()))
