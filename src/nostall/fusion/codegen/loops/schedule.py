"""How the loops of a pattern become rows and columns of a tile, from what its reductions remove.

Reductions are the sub-roots that fix the mapping, all else inherits it (arXiv:2009.10924).  The
tile is two-dimensional: *rows* are independent of each other, *columns* are what the reductions
remove.  Reductions over rows as well (the weight gradient beside the input gradient of a norm) are
*tails*: each program keeps partial results, a second kernel adds them up in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nostall.fusion.codegen.loops.dot_axes import group_loops, has_dots
from nostall.fusion.codegen.loops.mapping import LoopMapping, Loops, Operand, loops_used
from nostall.fusion.errors import BadFusion

ScheduleKind = Literal["flat", "rows", "dual", "dots"]
"""Elementwise only; reductions over columns; reductions over rows, too; small batched dots."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The pattern's loops as rows and columns, slowest first.

    ``reduced_rows`` are the row loops that the tails remove (the last ones of ``rows``); ``row_reductions`` are
    those reductions and ``epilogue`` what is computed from them.  ``loop_groups``: the columns of a pattern
    with small dots, by the axes of its matrices (:mod:`nostall.fusion.codegen.loops.dot_axes`).
    ``allow_online_softmax``: whether reductions may share a walk (:mod:`nostall.fusion.codegen.loops.online_softmax`).
    """

    mapping: LoopMapping
    rows: Loops
    columns: Loops
    reduced_rows: Loops = ()
    row_reductions: tuple[int, ...] = ()
    epilogue: tuple[int, ...] = ()
    loop_groups: tuple[Loops, ...] = ()
    allow_online_softmax: bool = True

    @property
    def kind(self) -> ScheduleKind:
        if self.loop_groups:
            return "dots"
        if self.row_reductions:
            return "dual"
        return "rows" if self.columns else "flat"

    def count(self, loops: Loops) -> int:
        return math.prod(self.mapping.loop_sizes[loop] for loop in loops)

    @property
    def row_count(self) -> int:
        return self.count(self.rows)

    @property
    def outer_row_count(self) -> int:
        """Steps of the slowest row loop: what kernels are told, each with :attr:`inner_row_count` rows."""
        return self.count(self.rows[:1])

    @property
    def inner_row_count(self) -> int:
        return self.count(self.rows[1:])

    @property
    def is_column_major(self) -> bool:
        """Whether neighbours in memory are those of one column."""
        return len(self.mapping.loop_sizes) - 1 in self.rows

    @property
    def column_count(self) -> int:
        return self.count(self.columns)

    def is_block_uniform(self, loops: Collection[int], rows: int) -> bool:
        """Whether what changes along ``loops`` does so from row to row, but is the same for all of
        ``rows`` that begin at a multiple of their number."""
        changing = [at for at, loop in enumerate(self.rows) if loop in loops]
        return bool(changing) and self.count(self.rows[changing[-1] + 1 :]) % rows == 0

    @cached_property
    def body(self) -> tuple[int, ...]:
        """The operators of the tile: all but the tails and what follows them."""
        apart = {*self.row_reductions, *self.epilogue}
        return tuple(i for i in self.mapping.operators if i not in apart)

    @cached_property
    def reduction_level(self) -> dict[int, int]:
        """Of every operator of the body, how many reductions in a row its value waits for."""
        return self.reduction_levels()

    def reduction_levels(self, beside: Collection[int] = ()) -> dict[int, int]:
        """As :attr:`reduction_level`, where the reductions ``beside`` run along with those they need."""
        found: dict[int, int] = {}
        for index in self.body:
            above = [found.get(o.source, 0) for o in self.mapping.operands[index]]
            waits = index in self.mapping.reduced_loops and index not in beside
            found[index] = max(above, default=0) + waits
        return found

    @cached_property
    def late_broadcast_operands(self) -> frozenset[Operand]:
        """What all rows read alike, column by column, where a reduction is over: a norm's weights,
        say."""
        rows, columns = set(self.rows), set(self.columns)
        late = (index for index in self.body if self.reduction_level[index])
        read = {operand for index in late for operand in self.mapping.operands[index]}
        loops = {one: loops_used(one.accesses) for one in read if self.mapping.is_in_memory(one)}
        return frozenset(one for one in loops if loops[one] & columns and not loops[one] & rows)

    def has_columns(self, index: int) -> bool:
        """Whether an operator has one value for each column, or one for all of them."""
        return bool(self.mapping.loops[index] & set(self.columns))

    def operand_has_columns(self, operand: Operand) -> bool:
        """Whether an operand has one value for each column, made here or in memory."""
        if operand.source in self.mapping.accesses:
            return self.has_columns(operand.source)
        return bool(loops_used(operand.accesses) & set(self.columns))

    @cached_property
    def peak_live_values(self) -> int:
        """How many values of the whole tile are live at once in the order they are emitted."""
        mapping = self.mapping
        order = {index: at for at, index in enumerate(mapping.operators)}
        last: dict[object, int] = {}
        first: dict[object, int] = {}
        for index in mapping.operators:
            for operand in mapping.operands[index]:
                inside = operand.source in order
                if inside and not self.has_columns(operand.source):
                    continue
                if mapping.graph[operand.source].kind == "constant":
                    continue
                value: object = operand.source if inside else operand
                first.setdefault(value, order[index])
                last[value] = order[index]
            if self.has_columns(index):
                first[index] = order[index]
                last.setdefault(index, order[index])
        accumulators = sum(
            self.operand_has_columns(o) for i in self.row_reductions for o in mapping.operands[i]
        )
        peak = max(
            (sum(first[v] <= at <= last[v] for v in first) for at in order.values()), default=1
        )
        return max(1, peak + accumulators)


def build_schedule(mapping: LoopMapping) -> Schedule:
    """Rows and columns for a mapping.

    Raises :class:`BadFusion` where its reductions remove loops that do not go together.
    """
    everything = tuple(range(len(mapping.loop_sizes)))
    if has_dots(mapping):
        batch, groups = group_loops(mapping)
        matrix = tuple(loop for loop in everything if loop not in batch)
        return Schedule(mapping, batch, matrix, loop_groups=groups)
    families = sorted(
        {frozenset(r) for r in mapping.reduced_loops.values()}, key=sorted, reverse=True
    )
    # A reduction of axes that are all 1 removes no loop: it is a copy.
    families = [family for family in families if family]
    if not families:
        return Schedule(mapping, everything, ())
    if len(families) == 1:
        columns = families[0]
        rows = tuple(loop for loop in everything if loop not in columns)
        return Schedule(mapping, rows, tuple(sorted(columns)))
    reasons = []
    # The fastest loops come first in `families`: rows are best read along them.
    for columns in families:
        try:
            return _build_dual_schedule(mapping, everything, columns)
        except BadFusion as error:
            reasons.append(str(error))
    raise BadFusion(reasons[0])


def _build_dual_schedule(
    mapping: LoopMapping, everything: Loops, columns: frozenset[int]
) -> Schedule:
    tails = tuple(i for i, r in mapping.reduced_loops.items() if r and r != columns)
    summed = {frozenset(mapping.reduced_loops[i] - columns) for i in tails}
    names = ", ".join(str(mapping.graph[i]) for i in tails)
    if len(summed) > 1 or frozenset() in summed:
        raise BadFusion(
            f"{names} reduce over different axes than the others and than each other; put them "
            "into different kernels"
        )
    (gone,) = summed
    after: list[int] = []
    apart = set(tails)
    for index in mapping.operators:
        inside = {o.source for o in mapping.operands[index] if o.source in mapping.accesses}
        if index in tails:
            whole = mapping.reduced_loops[index]
            if inside & apart or (whole & columns and not columns <= whole):
                raise BadFusion(
                    f"{mapping.graph[index]} is not a last step; give it its own kernel"
                )
            continue
        if not inside & apart:
            continue
        if not inside <= apart or index in mapping.reduced_loops or mapping.loops[index] & gone:
            raise BadFusion(
                f"{mapping.graph[index]} needs a sum over rows within the rows; give it its own "
                "kernel"
            )
        apart.add(index)
        after.append(index)
    kept = tuple(loop for loop in everything if loop not in columns and loop not in gone)
    last = tuple(sorted(gone))
    found = Schedule(mapping, kept + last, tuple(sorted(columns)), last, tails, tuple(after))
    if not any(mapping.reduced_loops.get(i) for i in found.body):
        raise BadFusion(f"{names} would be all reductions; there is nothing they run beside")
    return found
