"""Benchmark of programmatic dependent launch (PDL): are results the same as without overlap?

    python -m benchmarks run fusion.dependent_launch --out OUT [--rounds 40]

With PDL a kernel starts before the previous one ends and waits for it in its own code.  A wide
kernel reads one tensor and writes another; a narrow kernel reads the rows that the wide one writes
last and overwrites rows that the wide one reads.  Without the wait both would read and write too
early.

Sequences of these kernels run on a stream and in CUDA graphs, with copies, fills, cuBLAS products,
PyTorch kernels and work on another stream between them.  Every byte must equal that of a run that
synchronizes after each kernel.  The same kernels without the wait must differ; otherwise the
comparison could not detect an error.  Exit code 1 if either fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.result_file import save
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.kernel import StitchedKernel, load_kernel
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder

ROWS, COLUMNS, FEW_ROWS = 4096, 4096, 64
PAIRS = 8
"""A run has this many round trips of wide and narrow kernels from one tensor to the other."""
WAIT = "tl.extra.cuda.gdc_wait()"

OtherWork = Callable[[Tensor, Tensor], None]


def build_kernel(rows: int, folder: Path, *, has_wait: bool = True) -> StitchedKernel:
    """A kernel that subtracts half of each row's mean and adds 0.25.

    Every result depends on its whole row.  Without ``has_wait`` the wait of PDL is removed.
    """
    build = Builder()
    x = build.input((rows, COLUMNS))
    row_sum = build("sum", x, dims=(1,), keepdim=True)
    half_mean = build("mul", row_sum, build.constant(0.5 / COLUMNS))
    result = build("add", build("sub", x, half_mean), build.constant(0.25))
    graph = build.graph(result)
    schedule = schedule_operators(graph, graph.operators)
    program = emit(plan_kernel(schedule, KernelPlan("block", 1, (COLUMNS,), 4)))
    if not has_wait:
        assert WAIT in program.source
        program = replace(program, source=program.source.replace(WAIT, "pass"))
    return load_kernel(program, folder)


def _no_work(a: Tensor, b: Tensor) -> None: ...


def _copy_and_fill(a: Tensor, b: Tensor) -> None:
    """A copy and a fill, nodes of a CUDA graph that are not kernels, on rows that kernels read."""
    b[FEW_ROWS : 2 * FEW_ROWS].copy_(a[:FEW_ROWS])
    a[2 * FEW_ROWS : 3 * FEW_ROWS].zero_()


def _cublas_product(a: Tensor, b: Tensor) -> None:
    product = a.new_empty(FEW_ROWS, FEW_ROWS)
    torch.mm(a[:FEW_ROWS, :FEW_ROWS], b[-FEW_ROWS:, -FEW_ROWS:], out=product)
    a[FEW_ROWS : 2 * FEW_ROWS, :FEW_ROWS].copy_(product)


def _elementwise(a: Tensor, b: Tensor) -> None:
    a[-FEW_ROWS:].add_(b[:FEW_ROWS], alpha=0.5)


def _other_stream(a: Tensor, b: Tensor) -> None:
    """Kernels on another stream, ordered after the previous and before the next kernel."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        a[-FEW_ROWS:].mul_(0.5).add_(b[:FEW_ROWS])
    torch.cuda.current_stream().wait_stream(stream)


OTHER_WORK: dict[str, OtherWork] = {
    "nothing": _no_work,
    "a copy and a fill": _copy_and_fill,
    "a product of cuBLAS": _cublas_product,
    "a kernel of PyTorch": _elementwise,
    "another stream": _other_stream,
}


class KernelSequence:
    """A sequence of wide and narrow kernels between two tensors, with other work between them."""

    def __init__(self, wide: StitchedKernel, narrow: StitchedKernel, other_work: OtherWork) -> None:
        self.wide, self.narrow, self.other_work = wide, narrow, other_work
        generator = torch.Generator("cuda").manual_seed(0)
        self.first = torch.randn(ROWS, COLUMNS, device="cuda", generator=generator)
        self.a, self.b = self.first.clone(), torch.zeros_like(self.first)

    def reset(self) -> None:
        self.a.copy_(self.first)
        self.b.zero_()

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """Launch the sequence; call ``pause`` after every kernel."""
        for _ in range(PAIRS):
            for a, b in ((self.a, self.b), (self.b, self.a)):
                self.wide.launch((a,), (b,), {})
                pause()
                self.narrow.launch((b[-FEW_ROWS:],), (a[:FEW_ROWS],), {})
                pause()
                self.other_work(a, b)
                pause()

    def result(self) -> Tensor:
        torch.cuda.synchronize()
        return torch.cat([self.a, self.b]).view(torch.int32)


def count_differing_rounds(sequence: KernelSequence, rounds: int) -> dict[str, int]:
    """Number of rounds in which a byte differs, on a stream and as a CUDA graph."""
    sequence.reset()
    sequence.run(torch.cuda.synchronize)
    expected = sequence.result()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sequence.run()
    counts = dict.fromkeys(("stream", "graph"), 0)
    for _ in range(rounds):
        for name, run in (("stream", sequence.run), ("graph", graph.replay)):
            sequence.reset()
            run()
            counts[name] += not torch.equal(sequence.result(), expected)
    return counts


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    wide, narrow = build_kernel(ROWS, folder), build_kernel(FEW_ROWS, folder)
    counts: dict[str, Any] = {
        name: count_differing_rounds(KernelSequence(wide, narrow, other_work), rounds)
        for name, other_work in OTHER_WORK.items()
    }
    without_wait = (
        build_kernel(ROWS, folder, has_wait=False),
        build_kernel(FEW_ROWS, folder, has_wait=False),
    )
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": rounds,
        "kernels of ours in a round": 4 * PAIRS,
        "rounds that differ, by what is between": counts,
        "rounds that differ without the wait": count_differing_rounds(
            KernelSequence(*without_wait, _no_work), rounds
        ),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=40)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        record = measure(options.rounds, Path(folder))
    save(options.out, **record)
    for name, counts in record["rounds that differ, by what is between"].items():
        print(f"{name} between: {counts} of {options.rounds} rounds differ")
    without_wait = record["rounds that differ without the wait"]
    print(f"without the wait: {without_wait} of {options.rounds}")
    has_failed = any(
        any(counts.values()) for counts in record["rounds that differ, by what is between"].values()
    )
    if has_failed or not any(without_wait.values()):
        sys.exit(1)
