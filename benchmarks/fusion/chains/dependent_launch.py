"""Kernels launched before the one in front of them has ended, beside the same one after the other.

    python -m benchmarks run fusion.dependent_launch --out OUT [--rounds 40]

A wide kernel takes a whole tensor and writes another one; a narrow one reads the rows that the wide
one writes last and writes over rows of what it reads.  Each waits for the one before by itself
(programmatic dependent launch): without that they would read too early and write too early.  Runs
of many of them, on a stream and in CUDA graphs, with copies, fills, products of cuBLAS and another
stream between them, have to give every byte of runs that wait for the GPU after each kernel.  The
same kernels without their wait have to be caught: else the comparison would say nothing.
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
from nostall.fusion.codegen.runtime.kernel import StitchedKernel, load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder

ROWS, COLUMNS, FEW = 4096, 4096, 64
PAIRS = 8
"""Wide and narrow kernels of a run, from one tensor to the other and back."""
WAIT = "tl.extra.cuda.gdc_wait()"

Between = Callable[[Tensor, Tensor], None]


def kernel(rows: int, folder: Path, *, waits: bool = True) -> StitchedKernel:
    """Rows less half their mean, and a little more: every element depends on its row."""
    build = Builder()
    x = build.input((rows, COLUMNS))
    total = build("sum", x, dims=(1,), keepdim=True)
    half = build("mul", total, build.constant(0.5 / COLUMNS))
    moved = build("add", build("sub", x, half), build.constant(0.25))
    graph = build.graph(moved)
    of = schedule_operators(graph, graph.operators)
    program = emit(plan_kernel(of, KernelPlan("block", 1, (COLUMNS,), 4)))
    if not waits:
        assert WAIT in program.source
        program = replace(program, source=program.source.replace(WAIT, "pass"))
    return load_kernel(program, folder)


def _nothing(a: Tensor, b: Tensor) -> None: ...


def _copy_and_fill(a: Tensor, b: Tensor) -> None:
    """Nodes of a graph that are no kernels; what they touch the next kernels read."""
    b[FEW : 2 * FEW].copy_(a[:FEW])
    a[2 * FEW : 3 * FEW].zero_()


def _product(a: Tensor, b: Tensor) -> None:
    made = a.new_empty(FEW, FEW)
    torch.mm(a[:FEW, :FEW], b[-FEW:, -FEW:], out=made)
    a[FEW : 2 * FEW, :FEW].copy_(made)


def _elementwise(a: Tensor, b: Tensor) -> None:
    a[-FEW:].add_(b[:FEW], alpha=0.5)


def _other_stream(a: Tensor, b: Tensor) -> None:
    """A kernel beside, which has to see what came before and be seen by what comes after."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a[-FEW:].mul_(0.5).add_(b[:FEW])
    torch.cuda.current_stream().wait_stream(side)


BETWEEN: dict[str, Between] = {
    "nothing": _nothing,
    "a copy and a fill": _copy_and_fill,
    "a product of cuBLAS": _product,
    "a kernel of PyTorch": _elementwise,
    "another stream": _other_stream,
}


class Sequence:
    """Kernels one after the other on two tensors."""

    def __init__(self, wide: StitchedKernel, narrow: StitchedKernel, between: Between) -> None:
        self.wide, self.narrow, self.between = wide, narrow, between
        make = torch.Generator("cuda").manual_seed(0)
        self.first = torch.randn(ROWS, COLUMNS, device="cuda", generator=make)
        self.a, self.b = self.first.clone(), torch.zeros_like(self.first)

    def begin(self) -> None:
        self.a.copy_(self.first)
        self.b.zero_()

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        """``pause`` comes after every kernel."""
        for _ in range(PAIRS):
            for a, b in ((self.a, self.b), (self.b, self.a)):
                self.wide.launch((a,), (b,), {})
                pause()
                self.narrow.launch((b[-FEW:],), (a[:FEW],), {})
                pause()
                self.between(a, b)
                pause()

    def result(self) -> Tensor:
        torch.cuda.synchronize()
        return torch.cat([self.a, self.b]).view(torch.int32)


def differing(of: Sequence, rounds: int) -> dict[str, int]:
    """In how many rounds, on a stream and as a CUDA graph, some byte differed."""
    of.begin()
    of.run(torch.cuda.synchronize)
    wanted = of.result()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of.run()
    found = dict.fromkeys(("stream", "graph"), 0)
    for _ in range(rounds):
        for name, go in (("stream", of.run), ("graph", graph.replay)):
            of.begin()
            go()
            found[name] += not torch.equal(of.result(), wanted)
    return found


def measured(rounds: int, folder: Path) -> dict[str, Any]:
    wide, narrow = kernel(ROWS, folder), kernel(FEW, folder)
    found: dict[str, Any] = {
        name: differing(Sequence(wide, narrow, between), rounds)
        for name, between in BETWEEN.items()
    }
    hasty = kernel(ROWS, folder, waits=False), kernel(FEW, folder, waits=False)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rounds": rounds,
        "kernels of ours in a round": 4 * PAIRS,
        "rounds that differ, by what is between": found,
        "rounds that differ without the wait": differing(Sequence(*hasty, _nothing), rounds),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=40)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        record = measured(options.rounds, Path(folder))
    save(options.out, **record)
    for name, count in record["rounds that differ, by what is between"].items():
        print(f"{name} between: {count} of {options.rounds} rounds differ")
    without = record["rounds that differ without the wait"]
    print(f"without the wait: {without} of {options.rounds}")
    wrong = any(any(c.values()) for c in record["rounds that differ, by what is between"].values())
    if wrong or not any(without.values()):
        sys.exit(1)
