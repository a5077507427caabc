"""Measured times of single operators over a grid of sizes, and of copies to the GPU.

    python -m benchmarks.workload.gpu_operators --device cuda --out part.json

Run by ``benchmarks.workload.gpu``.  Each case is a call of one operator, forward or backward, in
bfloat16.  FLOP and bytes are counted as for module features.  No case has a shape of the profiled
models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.nn import functional

from nostall.workload.jobs.record import OperatorKind
from nostall.workload.modules.operator_counter import OperatorCounter

Call = Callable[[], Any]
T = TypeVar("T")
REPEATS, CALLS_PER_REPEAT = 5, 10
SLEEP_CYCLES = 20_000_000
"""GPU cycles (10 ms) before timed calls, during which the host launches all of them."""


@dataclass(frozen=True)
class Case:
    """A call of an operator of one kind."""

    kind: OperatorKind
    name: str
    call: Call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records = []
    grid = Grid(options.device, options.tiny)
    for case in cases(grid):
        with OperatorCounter() as counter:
            case.call()
        counts = counter.counts()
        of_kind = [o for o in counts.operators if o.kind is case.kind]
        all_bytes = sum(o.bytes_moved for o in counts.operators)
        kind_bytes = sum(o.bytes_moved for o in of_kind)
        if not of_kind:
            names = [o.name for o in counts.operators]
            print(f"{case.name}: no {case.kind} among {names}", flush=True)
            continue
        records.append(
            {
                "kind": case.kind.value,
                "case": case.name,
                "calls": sum(o.calls for o in of_kind),
                "flops": sum(o.flops for o in of_kind),
                "bytes": kind_bytes,
                "share_of_other_kinds": round(1 - kind_bytes / all_bytes, 4),
                "seconds": time_call(case.call, options.device),
            }
        )
    copies = [_time_copy(size, options.device) for size in grid.sizes(12, 29, 1)]
    options.out.write_text(json.dumps({"operators": records, "copies_to_gpu": copies}))
    print(f"{len(records)} operators, {len(copies)} copies")


def time_call(call: Call, device: str) -> float:
    """Median seconds of one call, without waiting for launches."""
    call()
    seconds = []
    for _ in range(REPEATS):
        if device == "cpu":
            start = perf_counter()
            for _ in range(CALLS_PER_REPEAT):
                call()
            seconds.append((perf_counter() - start) / CALLS_PER_REPEAT)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        for _ in range(CALLS_PER_REPEAT):
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3 / CALLS_PER_REPEAT)
    return median(seconds)


def _time_copy(size: int, device: str) -> dict[str, float]:
    source = torch.empty(size, dtype=torch.uint8)
    source = source.pin_memory() if device == "cuda" else source
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = time_call(lambda: target.copy_(source, non_blocking=True), device)
    return {"bytes": size, "seconds": seconds}


@dataclass(frozen=True)
class Grid:
    """Sizes and tensors of the cases; few and small ones for a test run (``tiny``)."""

    device: str
    tiny: bool

    def sizes(self, low: int, high: int, step: int) -> list[int]:
        """Powers of two with exponents from ``low`` to ``high``."""
        if self.tiny:
            low, high = low - 3, low - 3 + step
        return [2**n for n in range(low, high + 1, step)]

    def choose(self, values: Sequence[T]) -> Sequence[T]:
        """All values, or the first for a test run."""
        return values[:1] if self.tiny else values

    def width(self, size: int) -> int:
        return max(4, size // 64) if self.tiny else size

    def tensor(self, *shape: int, grad: bool = False) -> torch.Tensor:
        tensor = torch.randn(*shape, device=self.device, dtype=torch.bfloat16)
        return tensor.requires_grad_(grad)

    def image(self, *shape: int) -> torch.Tensor:
        """A tensor of shape [samples, channels, height, width] with channels-last strides."""
        tensor = self.tensor(*shape).contiguous(memory_format=torch.channels_last)
        return tensor.requires_grad_()


def cases(grid: Grid) -> Iterator[Case]:
    """All cases; the tensors of a case are freed when the next case is built."""
    for make in (
        _products,
        _convolutions,
        _attention,
        _elementwise,
        _row_operators,
        _image_operators,
        _embeddings,
    ):
        yield from make(grid)


def _backward(output: torch.Tensor, *inputs: torch.Tensor) -> Call:
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _products(grid: Grid) -> Iterator[Case]:
    kind = OperatorKind.PRODUCT
    widths = ((512, 512), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096))
    for m in grid.sizes(8, 14, 2):
        for k, n in [(grid.width(k), grid.width(n)) for k, n in grid.choose(widths)]:
            a, b, c, bias = grid.tensor(m, k), grid.tensor(k, n), grid.tensor(m, n), grid.tensor(n)
            yield Case(kind, f"mm {m} {k} {n}", partial(torch.mm, a, b))
            yield Case(kind, f"mm, left turned, {k} {m} {n}", partial(torch.mm, a.t(), c))
            yield Case(kind, f"mm, right turned, {m} {n} {k}", partial(torch.mm, c, b.t()))
            yield Case(kind, f"addmm {m} {k} {n}", partial(torch.addmm, bias, a, b))
    width = grid.width(1024)
    rows, words = grid.tensor(grid.width(8192), width), grid.tensor(width, grid.width(32768))
    yield Case(kind, "mm to a vocabulary", partial(torch.mm, rows, words))


def _convolutions(grid: Grid) -> Iterator[Case]:
    kind = OperatorKind.CONVOLUTION
    shapes = ((64, 64), (128, 32), (256, 16), (512, 8), (1024, 8))
    for channels, side in [(grid.width(c), grid.width(s)) for c, s in grid.choose(shapes)]:
        for samples, width in product(grid.choose((32, 160)), (1, 3)):
            x = grid.image(grid.width(samples), channels, side, side)
            for out in (channels // 2, channels):
                w = grid.image(out, channels, width, width)
                name = f"convolution {tuple(x.shape)} to {out}, {width}x{width}"
                call = partial(functional.conv2d, padding=width // 2)
                yield Case(kind, name, partial(call, x.detach(), w.detach()))
                yield Case(kind, f"{name}, backward", _backward(call(x, w), x, w))


def _attention(grid: Grid) -> Iterator[Case]:
    for length, samples in product(grid.sizes(7, 11, 1), grid.choose((4, 32))):
        heads = (samples, grid.width(16), length, 64)
        q, k, v = (grid.tensor(*heads, grad=True) for _ in range(3))
        for causal in (False, True):
            name = f"attention {heads}{', causal' if causal else ''}"
            call = partial(functional.scaled_dot_product_attention, is_causal=causal)
            forward = partial(call, q.detach(), k.detach(), v.detach())
            yield Case(OperatorKind.ATTENTION, name, forward)
            backward = _backward(call(q, k, v), q, k, v)
            yield Case(OperatorKind.ATTENTION, f"{name}, backward", backward)


def _elementwise(grid: Grid) -> Iterator[Case]:
    kind = OperatorKind.ELEMENTWISE
    for size in grid.sizes(15, 28, 2):
        x, y = grid.tensor(size, grad=True), grid.tensor(size)
        plain, transposed = x.detach(), y.view(128, -1).t()
        yield Case(kind, f"add {size}", partial(torch.add, plain, y))
        yield Case(kind, f"scale {size}", partial(torch.mul, plain, 2.0))
        yield Case(kind, f"tanh {size}", partial(torch.tanh, plain))
        yield Case(kind, f"gelu {size}", partial(functional.gelu, plain))
        yield Case(kind, f"gelu, backward, {size}", _backward(functional.gelu(x), x))
        yield Case(kind, f"relu, backward, {size}", _backward(functional.relu(x), x))
        yield Case(kind, f"to float {size}", plain.float)
        yield Case(kind, f"dropout {size}", partial(torch.native_dropout, plain, 0.1, True))
        yield Case(kind, f"turn {size}", transposed.contiguous)


def _row_operators(grid: Grid) -> Iterator[Case]:
    """Norms and sums over the rows or columns of matrices."""
    kind, width = OperatorKind.NORMALISATION, grid.width(1024)
    for rows in grid.sizes(6, 17, 2):
        x, w, b = (grid.tensor(*s, grad=True) for s in ((rows, width), (width,), (width,)))
        wide = grid.tensor(max(1, rows // 64), grid.width(32768)).float().requires_grad_()
        norm = functional.layer_norm(x, (width,), w, b)
        call = partial(functional.layer_norm, x.detach(), (width,), w.detach(), b.detach())
        yield Case(kind, f"layer norm {rows}", call)
        yield Case(kind, f"layer norm, backward, {rows}", _backward(norm, x, w, b))
        for name, call, argument in (
            ("softmax", partial(functional.softmax, dim=-1), x),
            ("log softmax", partial(functional.log_softmax, dim=-1), wide),
        ):
            yield Case(kind, f"{name} {rows}", partial(call, argument.detach()))
            yield Case(kind, f"{name}, backward, {rows}", _backward(call(argument), argument))
        yield Case(OperatorKind.REDUCTION, f"sum of columns {rows}", partial(x.detach().sum, 0))
        yield Case(OperatorKind.REDUCTION, f"mean of rows {rows}", partial(x.detach().mean, 1))


def _image_operators(grid: Grid) -> Iterator[Case]:
    for channels, side in grid.choose(((64, 96), (256, 48), (512, 24), (2048, 8))):
        for samples in map(grid.width, grid.choose((16, 160))):
            x = grid.image(samples, grid.width(channels), grid.width(side), grid.width(side))
            w, b = (grid.tensor(x.shape[1], grad=True) for _ in range(2))
            mean, var = (torch.ones_like(w) for _ in range(2))
            call = partial(functional.batch_norm, x, mean, var, w, b, training=True)
            name = f"batch norm {tuple(x.shape)}"
            yield Case(OperatorKind.NORMALISATION, name, call)
            yield Case(OperatorKind.NORMALISATION, f"{name}, backward", _backward(call(), x, w, b))
            pool = partial(functional.max_pool2d, kernel_size=3, stride=2, padding=1)
            name = f"pool {tuple(x.shape)}"
            yield Case(OperatorKind.REDUCTION, name, partial(pool, x.detach()))
            yield Case(OperatorKind.REDUCTION, f"{name}, backward", _backward(pool(x), x))


def _embeddings(grid: Grid) -> Iterator[Case]:
    table = grid.tensor(grid.width(32768), grid.width(1024), grad=True)
    for tokens in grid.sizes(8, 16, 1):
        index = torch.randint(len(table), (tokens,), device=grid.device)
        call = partial(functional.embedding, index, table.detach())
        yield Case(OperatorKind.EMBEDDING, f"look-up {tokens}", call)
        backward = _backward(functional.embedding(index, table), table)
        yield Case(OperatorKind.EMBEDDING, f"look-up, backward, {tokens}", backward)


if __name__ == "__main__":
    main()
