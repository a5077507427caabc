"""Kernels of every scheme that write down the random numbers they make, held to the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nostall.fusion import Builder
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators, stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.shapes import Shape
from nostall.fusion.testing.reference import interpret
from tests.unit.fusion.patterns import ROWS

SEED = -1234567890123
SIZES = (1, 6)
"""Of what varies."""
DRAWN = 3
"""Outputs of a case that are numbers or a mask."""


class _Case:
    """Numbers of two kinds and a mask, which are outputs, and what is computed from their sum."""

    def __init__(
        self, shape: Shape, dtype: str = "float32", kinds: tuple[int, int] = (4, 1)
    ) -> None:
        self.build = Builder()
        seed = self.build.input((1,), "int64")
        self.drawn = [
            self.build("random", seed, shape=shape, dtype=dtype, words=words) for words in kinds
        ]
        one, two = self.drawn
        # Nothing but a comparison reads these: no number is made of them.
        halves = self.build("random", seed, shape=shape, dtype="float32", words=8)
        mask = self.build("gt", halves, self.build.constant(0.3))
        self.drawn.append(mask)
        kept = self.build("mul", self.build("mul", mask, two), self.build.constant(1.25))
        self.sum = self.build("add", one, kept)

    def beside(self, shape: Shape, value: int | None = None) -> int:
        """The numbers, or a view of them, and a tensor."""
        return self.build("add", self.build.input(shape), self.sum if value is None else value)

    def graph(self, *outputs: int) -> Graph:
        return self.build.graph(*self.drawn, *outputs)

    def summed(self, value: int, *dims: int) -> int:
        """A value over its sum."""
        total = self.build("sum", value, dims=dims, keepdim=True)
        return self.build("div", value, total)


def _flat(shape: Shape, dtype: str = "float32", kinds: tuple[int, int] = (4, 8)) -> Graph:
    case = _Case(shape, dtype, kinds)
    return case.graph(case.beside(shape))


def _rows(shape: Shape, axis: int) -> Graph:
    case = _Case(shape)
    return case.graph(case.summed(case.beside(shape), axis))


def _both(shape: Shape) -> Graph:
    """Sums over columns beside one over rows."""
    case = _Case(shape)
    value = case.summed(case.beside(shape), 1)
    return case.graph(value, case.build("sum", value, dims=(0,), keepdim=False))


def _viewed(shape: Shape, other: Shape) -> Graph:
    case = _Case(shape)
    value = case.beside(other, case.build("view", case.sum, shape=other))
    return case.graph(case.summed(value, len(other) - 1))


def _permuted(shape: Shape) -> Graph:
    case = _Case(shape)
    value = case.beside(shape[::-1], case.build("permute", case.sum, dims=(1, 0)))
    return case.graph(case.summed(value, 1))


def _stretched(shape: Shape, wide: Shape) -> Graph:
    case = _Case(shape)
    return case.graph(case.summed(case.beside(wide), 1))


def _dotted(batch: int, m: int, k: int) -> Graph:
    case = _Case((batch, m, k))
    left = case.beside((batch, m, k))
    return case.graph(case.build("dot", left, case.build.input((batch, k, 5))))


CASES: dict[str, Callable[[], Graph]] = {
    "flat, whole fours": lambda: _flat((2, 3, 64)),
    "flat, others": lambda: _flat((7, 90), "float16"),
    "flat, short rows": lambda: _flat((5, 3)),
    "one axis": lambda: _flat((613,), kinds=(4, 1)),
    "a column": lambda: _flat((40, 1), kinds=(4, 1)),
    **{f"rows of {n}": lambda n=n: _rows((2, n), 1) for n in (91, 640, 1001)},
    **{f"an outer axis, {n} inside": lambda n=n: _rows((2, 10, n), 1) for n in (5, 8)},
    "rows and columns": lambda: _both((9, 42)),
    "split": lambda: _viewed((2, 24), (2, 3, 8)),
    "split unevenly": lambda: _viewed((2, 30), (2, 3, 10)),
    "joined": lambda: _viewed((3, 3, 10), (3, 30)),
    "permuted": lambda: _permuted((6, 10)),
    "one row for all": lambda: _stretched((1, 42), (3, 42)),
    "one number for a row": lambda: _stretched((6, 1), (6, 42)),
    "dots": lambda: _dotted(3, 9, 18),
    "dots, rows of 20": lambda: _dotted(3, 17, 20),
}
"""Without bf16, which the interpreter rounds in its own way."""
DYNAMIC: dict[str, Callable[[], Graph]] = {
    "rows": lambda: _rows((ROWS, 44), 1),
    "odd rows": lambda: _flat((ROWS, 2, 45)),
    "one axis": lambda: _flat((ROWS,)),
    "one long axis": lambda: _flat((ROWS * 6,)),
    "joined": lambda: _viewed((ROWS, 3, 10), (ROWS, 30)),
}


def random_number_errors(folder: Path, device: str = "cpu") -> Iterator[tuple[str, list[str]]]:
    """What is wrong with the numbers of each case, whatever its kernel; every case has kernels."""
    for name, make in CASES.items():
        yield name, list(_wrong(make(), folder, (None,), device))
    for name, make in DYNAMIC.items():
        yield f"dynamic {name}", list(_wrong(replace(make(), varying=ROWS), folder, SIZES, device))


def _wrong(graph: Graph, folder: Path, sizes: Sequence[int | None], device: str) -> Iterator[str]:
    for plan in _plans(schedule_operators(graph, graph.operators)):
        whole = stitch(
            graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
        )
        yield from (f"{plan}: refused: {reason}" for reason in whole.illegal_reasons)
        for size in sizes:
            found = _unequal(graph, whole, size, device)
            yield from (f"{plan}, {size}: {text}" for text in found)


def _plans(schedule: Schedule) -> list[KernelPlan]:
    """One of every scheme with one and several chunks and parts: of each kind one with the fewest
    programs, which are what takes time here, but several where there are such."""

    def programs(plan: KernelPlan) -> tuple[bool, int]:
        at_once = plan.chunks[0] if plan.scheme == "thread" else plan.rows
        count = -(-schedule.row_count // at_once) * plan.splits
        return count < 2, count

    kinds: dict[object, KernelPlan] = {}
    for plan in sorted(plans(schedule).legal_plans, key=programs):
        held = "held" if plan.scheme in ("warp", "block") else plan.scheme
        kinds.setdefault((held, len(plan.chunks) > 1, plan.has_equal_chunks, plan.splits > 1), plan)
    return list(kinds.values())


def _unequal(graph: Graph, stitched: StitchedGraph, size: int | None, device: str) -> Iterator[str]:
    sized = Graph(tuple(node.resized(graph.varying, size) for node in graph), graph.outputs)
    given = [torch.tensor([SEED]), *(torch.ones(sized[i].shape) for i in graph.inputs[1:])]
    made = stitched(*(value.to(device) for value in given))
    wanted = interpret(sized, [value.numpy() for value in given])
    for index, one, right in zip(graph.outputs[:DRAWN], made, wanted, strict=False):
        if not torch.equal(one.cpu(), torch.from_numpy(right).to(one.dtype)):
            share = np.mean(one.double().cpu().numpy() != right)
            yield f"{share:.0%} of {graph[index]} are others"
