"""Which sets of operators one kernel can compute.

The limits are those of the code generator, not of FusionStitching, whose paper leaves them open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.evaluate.work import Work
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, members
from nostall.fusion.graph.regions import region

MOST_OPERATORS = 64
"""As Inductor's ``max_fusion_size``: longer kernels spill and compile for long."""
MOST_ARGUMENTS = 64
"""As BladeDISC's ``max_num_arguments_per_kernel``."""
WIDEST_BLOCK = 65536
"""Elements of a row that one block can pass over several times; wider ones are shared by blocks,
with a kernel for each time."""
WIDEST_ROW = 1 << 20
"""Elements of a row that blocks can share: 256 of 4,096 each."""
_LAST = -1
"""The axis along which neighbours in memory lie, counted from the end."""
MOST_PACKED = 8
"""Independent parts of one kernel, as Inductor's combo kernels."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How a set of connected operators is laid out: ``rows`` independent pieces, each of at most
    ``columns`` elements; ``levels`` reductions one after the other inside a row (0: none is used
    by what follows in the same kernel).  ``outer``: rows lie across memory, along another axis than
    the first ones, and all values meet in them."""

    rows: int
    columns: int
    levels: int
    outer: bool = False

    def meets(self, rows: int) -> bool:
        """Whether values that meet in so many leading rows meet in these ones."""
        return self.outer or rows % self.rows == 0


def mapping(work: Work, mask: Mask) -> Mapping | None:
    """The layout of connected operators; None where no kernel can compute them together.

    A reduction whose value the kernel uses itself has to meet what it reads in rows, and so has
    everything that depends on it.  Anything else can be computed or read again where it is needed.
    Leaves may reduce across rows: they end in partial results and a second stage.  What is added to
    a set only adds constraints, so a superset of a set without a layout has none either.

    Rows are leading axes; where the reductions that are used keep another one (a softmax over
    channels, a batch norm), they are those that the code generator would take.
    """
    rows = widest = levels = 0
    inside = set(members(mask))
    level: dict[int, int] = {}
    for index in members(mask):
        widest = max(widest, work.iterated[index])
        used = not inside.isdisjoint(work.graph.consumers[index])
        reduces = index in work.reductions
        above = 0
        for edge in work.edges[index]:
            waits = level.get(edge.source, 0)
            above = max(above, waits)
            if used if reduces else waits:
                rows = math.gcd(rows, edge.rows)
        level[index] = above + (reduces and used)
        levels = max(levels, level[index])
    rows = max(1, rows)
    columns = -(-widest // rows)
    if not levels or columns <= WIDEST_BLOCK:
        return Mapping(rows, columns, levels)
    kept = _kept(work, mask)
    found = _across(work, mask, levels) if kept else None
    if found is not None or max(kept, default=None) == _LAST:
        return found
    return Mapping(rows, columns, levels) if columns <= WIDEST_ROW else None


def _kept(work: Work, mask: Mask) -> frozenset[int]:
    """The axes that no reduction that is used removes, counted from the last one on which there is
    something."""
    inside = set(members(mask))
    used = (i for i in inside & work.reductions if not inside.isdisjoint(work.graph.consumers[i]))
    every = [_kept_by(work.graph, index) for index in used]
    return frozenset.intersection(*every) if every else frozenset()


def _across(work: Work, mask: Mask, levels: int) -> Mapping | None:
    """Rows as the code generator lays them."""
    if mask not in work.across:
        pattern = region(work.graph, list(members(mask))).graph
        try:
            of = schedule_operators(pattern, pattern.operators)
            work.across[mask] = (of.row_count, of.column_count) if of.kind == "rows" else None
        except BadInput:
            work.across[mask] = None
    found = work.across[mask]
    if found is None or found[1] > WIDEST_BLOCK:
        return None
    return Mapping(*found, levels, outer=True)


def _kept_by(graph: Graph, index: int) -> frozenset[int]:
    node = graph[index]
    if node.kind != "reduce":
        return frozenset()
    shape = graph[node.inputs[0]].shape
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    return frozenset(axis - 1 - max(wide) for axis in wide if axis not in node.dims)


def connected(work: Work, mask: Mask) -> list[Mask]:
    """The parts of a set that neither pass data to each other nor read a common source."""
    parts: list[tuple[Mask, set[int]]] = []
    for index in members(mask):
        touched = {edge.source for edge in work.edges[index]} | {index}
        joined = 1 << index
        apart = []
        for part, sources in parts:
            if sources & touched:
                joined |= part
                touched |= sources
            else:
                apart.append((part, sources))
        parts = [*apart, (joined, touched)]
    return sorted((part for part, _ in parts), key=lambda part: part & -part)
