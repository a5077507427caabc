"""Which sets of operators one kernel can compute, and the row layout of such a kernel.

The limits are those of nostall's code generator. FusionStitching's papers give none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.evaluate.work import GraphWork
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, members
from nostall.fusion.graph.regions import extract_region

MAX_OPERATORS = 64
"""Operators of a kernel, as Inductor's ``max_fusion_size``; more would spill and compile slowly."""
MAX_ARGUMENTS = 64
"""Tensors that a kernel reads or writes; BladeDISC's ``max_num_arguments_per_kernel``."""
MAX_BLOCK_COLUMNS = 65536
"""Elements of a row that one block can loop over several times. Several blocks share a wider row,
with one kernel for each loop."""
MAX_COLUMNS = 1 << 20
"""Elements of a row that several blocks can share: 256 blocks of 4,096 each."""
MAX_PACKED_PARTS = 8
"""Independent parts of one kernel, as in Inductor's combo kernels."""
_LAST_AXIS = -1
"""The axis along which neighbours are adjacent in memory, counted from the end."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Division of the elements of a kernel of connected operators into independent rows."""

    rows: int
    columns: int
    """Elements of a row, at most."""
    levels: int
    """Length of the longest chain of dependent reductions whose results the kernel itself uses."""
    outer: bool = False
    """Whether rows run across memory, along other axes than the leading ones. All values of the
    kernel are aligned in such rows."""

    def is_aligned(self, rows: int) -> bool:
        """Whether values that are aligned in ``rows`` leading rows are aligned in these rows."""
        return self.outer or rows % self.rows == 0


def row_layout(work: GraphWork, mask: Mask) -> RowLayout | None:
    """The row layout of connected operators; None if no kernel can compute them together.

    A reduction whose result the kernel uses must be aligned in rows with its operand, and so must
    all operators that depend on it. Other values can be computed or read again where they are
    needed. A reduction whose result the kernel does not use may reduce across rows: it ends in
    partial results and a second stage. More operators only add constraints, so if a set has no
    layout, no superset has one.

    Rows are the leading axes. If the used reductions keep other axes (a softmax over channels, a
    batch norm), rows are those that the code generator would use.
    """
    rows = widest = levels = 0
    inside = set(members(mask))
    level: dict[int, int] = {}
    for index in members(mask):
        widest = max(widest, work.iterations[index])
        is_used = not inside.isdisjoint(work.graph.consumers[index])
        is_reduction = index in work.reductions
        max_level = 0
        for edge in work.edges[index]:
            source_level = level.get(edge.source, 0)
            max_level = max(max_level, source_level)
            if is_used if is_reduction else source_level:
                rows = math.gcd(rows, edge.rows)
        level[index] = max_level + (is_reduction and is_used)
        levels = max(levels, level[index])
    rows = max(1, rows)
    columns = -(-widest // rows)
    if not levels or columns <= MAX_BLOCK_COLUMNS:
        return RowLayout(rows, columns, levels)
    kept_axes = _kept_axes(work, mask)
    outer = _outer_layout(work, mask, levels) if kept_axes else None
    if outer is not None or max(kept_axes, default=None) == _LAST_AXIS:
        return outer
    return RowLayout(rows, columns, levels) if columns <= MAX_COLUMNS else None


def _kept_axes(work: GraphWork, mask: Mask) -> frozenset[int]:
    """Axes that all used reductions keep, counted back from the last axis longer than 1."""
    inside = set(members(mask))
    used = (i for i in inside & work.reductions if not inside.isdisjoint(work.graph.consumers[i]))
    axes = [_axes_kept_by(work.graph, index) for index in used]
    return frozenset.intersection(*axes) if axes else frozenset()


def _outer_layout(work: GraphWork, mask: Mask, levels: int) -> RowLayout | None:
    """The layout with the rows of the code generator's schedule; None if it has none that fits."""
    if mask not in work.outer_rows:
        pattern = extract_region(work.graph, list(members(mask))).graph
        try:
            schedule = schedule_operators(pattern, pattern.operators)
            work.outer_rows[mask] = (
                (schedule.row_count, schedule.column_count) if schedule.kind == "rows" else None
            )
        except BadInput:
            work.outer_rows[mask] = None
    sizes = work.outer_rows[mask]
    if sizes is None or sizes[1] > MAX_BLOCK_COLUMNS:
        return None
    return RowLayout(*sizes, levels, outer=True)


def _axes_kept_by(graph: Graph, index: int) -> frozenset[int]:
    node = graph[index]
    if node.kind != "reduce":
        return frozenset()
    shape = graph[node.inputs[0]].shape
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    return frozenset(axis - 1 - max(wide) for axis in wide if axis not in node.dims)


def connected_parts(work: GraphWork, mask: Mask) -> list[Mask]:
    """The parts of a set of operators that neither exchange data nor read a common source."""
    parts: list[tuple[Mask, set[int]]] = []
    for index in members(mask):
        touched = {edge.source for edge in work.edges[index]} | {index}
        joined = 1 << index
        separate = []
        for part, sources in parts:
            if sources & touched:
                joined |= part
                touched |= sources
            else:
                separate.append((part, sources))
        parts = [*separate, (joined, touched)]
    return sorted((part for part, _ in parts), key=lambda part: part & -part)
