"""Random numbers of kernels of all schemes, compared with the reference implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tools.interpreters.reference import interpret

from nostall.fusion import Builder
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.shapes import Shape
from tests.unit.fusion.pattern_tables import ROWS

SEED = -1234567890123
SIZES = (1, 6)
"""Values of the dynamic size."""
RANDOM_OUTPUTS = 3
"""The first outputs of a case: two random tensors and a mask."""


class _Case:
    """A graph under construction: outputs are two random tensors and a mask; inputs are added."""

    def __init__(
        self, shape: Shape, dtype: str = "float32", kinds: tuple[int, int] = (4, 1)
    ) -> None:
        self.build = Builder()
        seed = self.build.input((1,), "int64")
        self.drawn = [
            self.build("random", seed, shape=shape, dtype=dtype, words=words) for words in kinds
        ]
        one, two = self.drawn
        # Only a comparison reads these, so kernels need not convert them to floats.
        halves = self.build("random", seed, shape=shape, dtype="float32", words=8)
        mask = self.build("gt", halves, self.build.constant(0.3))
        self.drawn.append(mask)
        kept = self.build("mul", self.build("mul", mask, two), self.build.constant(1.25))
        self.sum = self.build("add", one, kept)

    def add_input(self, shape: Shape, value: int | None = None) -> int:
        """The sum of the random numbers, or of a view of them, and an input."""
        return self.build("add", self.build.input(shape), self.sum if value is None else value)

    def graph(self, *outputs: int) -> Graph:
        return self.build.graph(*self.drawn, *outputs)

    def normalized(self, value: int, *dims: int) -> int:
        """A value divided by its sum."""
        total = self.build("sum", value, dims=dims, keepdim=True)
        return self.build("div", value, total)


def _flat(shape: Shape, dtype: str = "float32", kinds: tuple[int, int] = (4, 8)) -> Graph:
    case = _Case(shape, dtype, kinds)
    return case.graph(case.add_input(shape))


def _rows(shape: Shape, axis: int) -> Graph:
    case = _Case(shape)
    return case.graph(case.normalized(case.add_input(shape), axis))


def _both(shape: Shape) -> Graph:
    """A graph with sums over columns and one over rows."""
    case = _Case(shape)
    value = case.normalized(case.add_input(shape), 1)
    return case.graph(value, case.build("sum", value, dims=(0,), keepdim=False))


def _viewed(shape: Shape, other: Shape) -> Graph:
    case = _Case(shape)
    value = case.add_input(other, case.build("view", case.sum, shape=other))
    return case.graph(case.normalized(value, len(other) - 1))


def _permuted(shape: Shape) -> Graph:
    case = _Case(shape)
    value = case.add_input(shape[::-1], case.build("permute", case.sum, dims=(1, 0)))
    return case.graph(case.normalized(value, 1))


def _stretched(shape: Shape, wide: Shape) -> Graph:
    case = _Case(shape)
    return case.graph(case.normalized(case.add_input(wide), 1))


def _dotted(batch: int, m: int, k: int) -> Graph:
    case = _Case((batch, m, k))
    left = case.add_input((batch, m, k))
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
"""Without bf16, which the interpreter rounds differently."""
DYNAMIC: dict[str, Callable[[], Graph]] = {
    "rows": lambda: _rows((ROWS, 44), 1),
    "odd rows": lambda: _flat((ROWS, 2, 45)),
    "one axis": lambda: _flat((ROWS,)),
    "one long axis": lambda: _flat((ROWS * 6,)),
    "joined": lambda: _viewed((ROWS, 3, 10), (ROWS, 30)),
}


def random_number_errors(folder: Path, device: str = "cpu") -> Iterator[tuple[str, list[str]]]:
    """Errors in the random numbers of each case, with all representative plans."""
    for name, make in CASES.items():
        yield name, list(_errors(make(), folder, (None,), device))
    for name, make in DYNAMIC.items():
        yield f"dynamic {name}", list(_errors(replace(make(), varying=ROWS), folder, SIZES, device))


def _errors(graph: Graph, folder: Path, sizes: Sequence[int | None], device: str) -> Iterator[str]:
    for plan in _plans(schedule_operators(graph, graph.operators)):
        stitched = stitch(
            graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
        )
        yield from (f"{plan}: refused: {reason}" for reason in stitched.illegal_reasons)
        for size in sizes:
            errors = _differences(graph, stitched, size, device)
            yield from (f"{plan}, {size}: {text}" for text in errors)


def _plans(schedule: Schedule) -> list[KernelPlan]:
    """Plans of all schemes, with one and several chunks and splits.

    Of each kind the plan with the fewest programs, because programs take the time here, but with at
    least two programs if possible.
    """

    def programs(plan: KernelPlan) -> tuple[bool, int]:
        at_once = plan.chunks[0] if plan.scheme == "thread" else plan.rows
        count = -(-schedule.row_count // at_once) * plan.splits
        return count < 2, count

    kinds: dict[object, KernelPlan] = {}
    for plan in sorted(plans(schedule).legal_plans, key=programs):
        scheme = "register rows" if plan.scheme in ("warp", "block") else plan.scheme
        kinds.setdefault(
            (scheme, len(plan.chunks) > 1, plan.has_equal_chunks, plan.splits > 1), plan
        )
    return list(kinds.values())


def _differences(
    graph: Graph, stitched: StitchedGraph, size: int | None, device: str
) -> Iterator[str]:
    sized = Graph(tuple(node.resized(graph.varying, size) for node in graph), graph.outputs)
    inputs = [torch.tensor([SEED]), *(torch.ones(sized[i].shape) for i in graph.inputs[1:])]
    outputs = stitched(*(value.to(device) for value in inputs))
    expected = interpret(sized, [value.numpy() for value in inputs])
    random_outputs = zip(graph.outputs[:RANDOM_OUTPUTS], outputs, expected, strict=False)
    for index, output, reference in random_outputs:
        if not torch.equal(output.cpu(), torch.from_numpy(reference).to(output.dtype)):
            share = np.mean(output.double().cpu().numpy() != reference)
            yield f"{share:.0%} of {graph[index]} differ from the reference"
