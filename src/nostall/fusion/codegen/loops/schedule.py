"""Schedule of a pattern: the assignment of its loops to rows and columns of a tile.

Reductions are the sub-roots that fix the mapping, and all other operators inherit it
(arXiv:2009.10924).  The tile is two-dimensional: the reductions remove the *columns*, and *rows*
are independent of each other.  A reduction over rows (the weight gradient beside the input
gradient of a norm) is a *row reduction*: each program keeps a partial result, and a second kernel
adds the partial results in a fixed order.  A reduction over a block of neighbouring columns is a
*block reduction*.

Block-wise quantisation behind a norm reduces a row twice: the norm removes all of its columns, and
the scales remove 128 neighbouring columns each.  If every chunk of a tile has whole blocks, the
second reduction needs nothing from outside of the chunk: it is computed like an elementwise
operator, also in a loop over the columns.  Its result has the same value in all columns of a block.

Blocks have a power of two of columns, so that chunks of a tile, which are powers of two, have a
whole number of them.
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

MAX_BLOCK_COLUMNS = 1024
"""Columns of a block at most: each iteration of a loop over the columns has whole blocks."""


def block_reductions(mapping: LoopMapping, columns: Collection[int]) -> tuple[int, ...]:
    """The reductions of a mapping that remove blocks of neighbouring columns, in graph order.

    ``columns``: the loops that reductions over whole rows remove.
    """
    ordered = sorted(columns)
    if not ordered or ordered[-1] != len(mapping.loop_sizes) - 1:
        return ()  # rows are neighbours in memory, not columns
    return tuple(
        index
        for index, loops in mapping.reduced_loops.items()
        if loops
        and len(loops) < len(ordered)
        and sorted(loops) == ordered[-len(loops) :]
        and _is_block(block_columns(mapping, index))
    )


def block_columns(mapping: LoopMapping, index: int) -> int:
    """The number of columns that a block reduction reduces to one value."""
    return math.prod(mapping.loop_sizes[loop] for loop in mapping.reduced_loops[index])


def _is_block(columns: int) -> bool:
    return columns & (columns - 1) == 0 and columns <= MAX_BLOCK_COLUMNS


ScheduleKind = Literal["flat", "rows", "dual", "dots"]
"""Elementwise only; reductions over columns; reductions over rows, too; small batched dots."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The loops of a pattern as rows and columns of a tile, slowest first."""

    mapping: LoopMapping
    rows: Loops
    columns: Loops
    reduced_rows: Loops = ()
    """Row loops that row reductions remove: the last ones of ``rows``."""
    row_reductions: tuple[int, ...] = ()
    """Reductions over ``reduced_rows``."""
    epilogue: tuple[int, ...] = ()
    """Operators that follow row reductions: they run in the second kernel."""
    block_reductions: tuple[int, ...] = ()
    """Reductions over blocks of neighbouring columns."""
    loop_groups: tuple[Loops, ...] = ()
    """The columns of a pattern with small dots, by matrix axis
    (:mod:`nostall.fusion.codegen.loops.dot_axes`); () without dots."""
    allow_online_softmax: bool = True
    """Whether a maximum and its sum may share a loop over the columns
    (:mod:`nostall.fusion.codegen.loops.online_reductions`)."""
    allow_online_variance: bool = True
    """Whether a sum and the sum of (x - mean)^2 may share a loop
    (:mod:`nostall.fusion.codegen.loops.online_reductions`)."""

    outer_rows: int = 1
    """The slowest row loops, whose joint count is an argument of the kernel: several only if their
    sizes are dynamic and all tensors are contiguous along them."""

    @property
    def kind(self) -> ScheduleKind:
        """The family of schedules: without reductions, with reductions over columns, with
        reductions over columns and over rows, or with small dots."""
        if self.loop_groups:
            return "dots"
        if self.row_reductions:
            return "dual"
        return "rows" if self.columns else "flat"

    def count(self, loops: Loops) -> int:
        """Iterations of a loop nest."""
        return math.prod(self.mapping.loop_sizes[loop] for loop in loops)

    @property
    def row_count(self) -> int:
        return self.count(self.rows)

    @property
    def outer_row_count(self) -> int:
        """Iterations of the slowest row loops, each with :attr:`inner_row_count` rows.

        Kernels get this count as an argument.
        """
        return self.count(self.rows[: self.outer_rows])

    @property
    def inner_row_count(self) -> int:
        return self.count(self.rows[self.outer_rows :])

    @property
    def is_column_major(self) -> bool:
        """Whether the fastest loop in memory is a row loop."""
        return len(self.mapping.loop_sizes) - 1 in self.rows

    @property
    def column_count(self) -> int:
        return self.count(self.columns)

    def is_block_uniform(self, loops: Collection[int], rows: int) -> bool:
        """Whether a value that depends on ``loops`` is equal in all rows of an aligned block.

        A block has ``rows`` rows and begins at a multiple of ``rows``.  False if the value depends
        on no row loop.
        """
        positions = [at for at, loop in enumerate(self.rows) if loop in loops]
        return bool(positions) and self.count(self.rows[positions[-1] + 1 :]) % rows == 0

    @cached_property
    def body(self) -> tuple[int, ...]:
        """The operators of the tile: all but row reductions and the epilogue."""
        excluded = {*self.row_reductions, *self.epilogue}
        return tuple(i for i in self.mapping.operators if i not in excluded)

    @cached_property
    def reduction_level(self) -> dict[int, int]:
        """For each operator of the body, the longest chain of reductions that its value needs.

        A reduction counts itself.
        """
        return self.reduction_levels()

    def reduction_levels(self, merged: Collection[int] = ()) -> dict[int, int]:
        """As :attr:`reduction_level`, but reductions in ``merged`` add no level.

        They share a loop with the reductions that they need.
        """
        levels: dict[int, int] = {}
        for index in self.body:
            operand_levels = [levels.get(o.source, 0) for o in self.mapping.operands[index]]
            adds_level = index in self.mapping.reduced_loops and index not in (
                *merged,
                *self.block_reductions,
            )
            levels[index] = max(operand_levels, default=0) + adds_level
        return levels

    @cached_property
    def late_broadcast_operands(self) -> frozenset[Operand]:
        """Operands that are read after a reduction and broadcast along rows: the weights of a
        norm, for example."""
        rows, columns = set(self.rows), set(self.columns)
        late = (index for index in self.body if self.reduction_level[index])
        operands = {operand for index in late for operand in self.mapping.operands[index]}
        loops = {o: loops_used(o.accesses) for o in operands if self.mapping.is_in_memory(o)}
        return frozenset(o for o in loops if loops[o] & columns and not loops[o] & rows)

    def removes_columns(self, index: int) -> bool:
        """Whether an operator reduces a row to one value: a reduction, but not of blocks."""
        return bool(self.mapping.reduced_loops.get(index)) and index not in self.block_reductions

    @cached_property
    def block_columns(self) -> int:
        """Columns of the largest block that a reduction removes; 1 if there is none."""
        return max((block_columns(self.mapping, i) for i in self.block_reductions), default=1)

    def is_uniform_in_blocks(self, index: int) -> bool:
        """Whether an operator has the same value in neighbouring columns: a scale of a block."""
        return bool(self.block_reductions) and self.columns[-1] not in self.mapping.loops[index]

    def has_columns(self, index: int) -> bool:
        """Whether an operator has a value for each column, rather than one for all columns."""
        return bool(self.mapping.loops[index] & set(self.columns))

    def operand_has_columns(self, operand: Operand) -> bool:
        """Whether an operand, computed here or in memory, has a value for each column."""
        if operand.source in self.mapping.accesses:
            return self.has_columns(operand.source)
        return bool(loops_used(operand.accesses) & set(self.columns))

    @cached_property
    def peak_live_values(self) -> int:
        """The maximum number of tile-sized values that are live at once, in emission order."""
        mapping = self.mapping
        order = {index: at for at, index in enumerate(mapping.operators)}
        last_use: dict[object, int] = {}
        first_use: dict[object, int] = {}
        for index in mapping.operators:
            for operand in mapping.operands[index]:
                inside = operand.source in order
                if inside and not self.has_columns(operand.source):
                    continue
                if mapping.graph[operand.source].kind == "constant":
                    continue
                value: object = operand.source if inside else operand
                first_use.setdefault(value, order[index])
                last_use[value] = order[index]
            if self.has_columns(index):
                first_use[index] = order[index]
                last_use.setdefault(index, order[index])
        accumulators = sum(
            self.operand_has_columns(o) for i in self.row_reductions for o in mapping.operands[i]
        )
        peak = max(
            (sum(first_use[v] <= at <= last_use[v] for v in first_use) for at in order.values()),
            default=1,
        )
        return max(1, peak + accumulators)


def build_schedule(mapping: LoopMapping) -> Schedule:
    """Choose rows and columns for a mapping.

    Raises :class:`BadFusion` if its reductions remove loops that cannot share a tile.
    """
    all_loops = tuple(range(len(mapping.loop_sizes)))
    if has_dots(mapping):
        batch, groups = group_loops(mapping)
        matrix_loops = tuple(loop for loop in all_loops if loop not in batch)
        return Schedule(mapping, batch, matrix_loops, loop_groups=groups)
    reduced_sets = sorted(
        {frozenset(r) for r in mapping.reduced_loops.values()}, key=sorted, reverse=True
    )
    # A reduction over axes of size 1 removes no loop: it is a copy.
    reduced_sets = [loops for loops in reduced_sets if loops]
    if not reduced_sets:
        return Schedule(mapping, all_loops, ())
    if len(reduced_sets) == 1:
        columns = reduced_sets[0]
        rows = tuple(loop for loop in all_loops if loop not in columns)
        return Schedule(mapping, rows, tuple(sorted(columns)))
    reasons = []
    # The set with the fastest loops comes first: columns along them give coalesced reads.
    candidates: list[tuple[frozenset[int], tuple[int, ...]]]
    candidates = [(columns, ()) for columns in reduced_sets]
    candidates += [(c, blocks) for c in reduced_sets if (blocks := block_reductions(mapping, c))]
    for columns, blocks in candidates:
        try:
            return _build_row_schedule(mapping, all_loops, columns, blocks)
        except BadFusion as error:
            reasons.append(str(error))
    raise BadFusion(reasons[0])


def _build_row_schedule(
    mapping: LoopMapping, all_loops: Loops, columns: frozenset[int], blocks: tuple[int, ...]
) -> Schedule:
    """The schedule with these columns and block reductions; all other reductions are over rows."""
    row_reductions = tuple(
        i for i, r in mapping.reduced_loops.items() if r and r != columns and i not in blocks
    )
    if not row_reductions:
        rows = tuple(loop for loop in all_loops if loop not in columns)
        return Schedule(mapping, rows, tuple(sorted(columns)), block_reductions=blocks)
    reduced_row_sets = {frozenset(mapping.reduced_loops[i] - columns) for i in row_reductions}
    names = ", ".join(str(mapping.graph[i]) for i in row_reductions)
    if len(reduced_row_sets) > 1 or frozenset() in reduced_row_sets:
        raise BadFusion(
            f"{names} reduce over different axes than the others and than each other; put them "
            "into different kernels"
        )
    (reduced_rows,) = reduced_row_sets
    epilogue = _find_epilogue(mapping, row_reductions, reduced_rows, columns)
    kept_rows = tuple(loop for loop in all_loops if loop not in columns | reduced_rows)
    if any(not mapping.loops[index].issuperset(kept_rows) for index in row_reductions):
        raise BadFusion(
            f"{names} would be computed again for each copy of a broadcast operand; put them into "
            "kernels of their own"
        )
    last_rows = tuple(sorted(reduced_rows))
    schedule = Schedule(
        mapping,
        kept_rows + last_rows,
        tuple(sorted(columns)),
        last_rows,
        row_reductions,
        epilogue,
        block_reductions=blocks,
    )
    if not any(map(schedule.removes_columns, schedule.body)):
        raise BadFusion(
            f"{names} would be all reductions of the kernel, which needs one over its columns, too"
        )
    return schedule


def _find_epilogue(
    mapping: LoopMapping,
    row_reductions: tuple[int, ...],
    reduced_rows: frozenset[int],
    columns: frozenset[int],
) -> tuple[int, ...]:
    """The operators that follow row reductions.

    Raises :class:`BadFusion` if they cannot run in a second kernel.
    """
    epilogue: list[int] = []
    in_second_kernel = set(row_reductions)
    for index in mapping.operators:
        producers = {o.source for o in mapping.operands[index] if o.source in mapping.accesses}
        if index in row_reductions:
            reduced = mapping.reduced_loops[index]
            if producers & in_second_kernel or (reduced & columns and not columns <= reduced):
                raise BadFusion(
                    f"{mapping.graph[index]} is not a last step; give it its own kernel"
                )
            continue
        if not producers & in_second_kernel:
            continue
        if (
            not producers <= in_second_kernel
            or index in mapping.reduced_loops
            or mapping.loops[index] & reduced_rows
        ):
            raise BadFusion(
                f"{mapping.graph[index]} needs a sum over rows within the rows; give it its own "
                "kernel"
            )
        in_second_kernel.add(index)
        epilogue.append(index)
    return tuple(epilogue)
