"""The plan space: all plans of a schedule that are worth modelling, and the illegal ones.

``CANDIDATES`` has one generator of plans for each kind of schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nostall.fusion.codegen.loops.schedule import Schedule, ScheduleKind
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, Scheme
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.sequence_tiles import MIN_TILE_POSITIONS, find_sequence_tiling
from nostall.fusion.codegen.tiling.tile_sizes import (
    MAX_IDLE_SHARE,
    WARP_SIZE,
    equal_chunks,
    idle_share,
    max_lanes_per_position,
    max_matrix_lanes,
    mixed_chunks,
    next_power_of_two,
)

MIN_WIDE_COLUMNS = 512
"""Rows of at least this many columns may have at most ``MAX_IDLE_SHARE`` of their lanes masked.
Several shorter rows share a warp, and either way of cutting them may be faster."""
MAX_SPLITS = 256
"""Programs that share a row (``split``): the next kernel loads their partial results at once."""
MAX_ROW_GROUPS = 512
"""Groups of rows (``column``): four programs for each SM, if registers let them be resident."""
MAX_LOOP_WARPS = 16
"""Warps of a program that loops over the columns of several rows, or of a short one."""
LONG_LOOP_WARPS, MIN_LONG_COLUMNS = 32, 1 << 16
"""Warps of a program that loops over one row of at least so many columns. Few programs are then
resident, and their rows stay in L2 between two passes."""


@dataclass(frozen=True)
class IllegalPlan:
    """A plan that was considered and rejected."""

    plan: KernelPlan
    reason: str


@dataclass(frozen=True)
class Plans:
    """The plan space of a schedule."""

    legal: tuple[PlannedKernel, ...]
    illegal: tuple[IllegalPlan, ...]

    @property
    def legal_plans(self) -> tuple[KernelPlan, ...]:
        """The plans of the legal kernels, without their common schedule."""
        return tuple(kernel.plan for kernel in self.legal)


@lru_cache(maxsize=32)
def plans(schedule: Schedule) -> Plans:
    """All candidate plans of a schedule, each of them legal or illegal with a reason."""
    legal, illegal = [], []
    for plan in CANDIDATES[schedule.kind](schedule):
        reason = _rejection_reason(schedule, plan)
        if reason is None:
            legal.append(PlannedKernel(schedule, plan))
        else:
            illegal.append(IllegalPlan(plan, reason))
    return Plans(tuple(legal), tuple(illegal))


def first_illegal_reason(schedule: Schedule) -> str | None:
    """Why the first candidate plan of a schedule is illegal; None if any candidate is legal."""
    first = None
    for plan in CANDIDATES[schedule.kind](schedule):
        reason = _rejection_reason(schedule, plan)
        if reason is None:
            return None
        first = first or reason
    return first


def _rejection_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    return _idle_reason(schedule, plan) or illegal_reason(schedule, plan)


def _idle_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan is not worth modelling: too many lanes of a wide row would be masked."""
    if plan.scheme in ("warp", "block", "column") and schedule.column_count >= MIN_WIDE_COLUMNS:
        idle = idle_share(schedule.column_count, plan.chunks)
        if idle > MAX_IDLE_SHARE:
            return f"{idle:.0%} of the lanes would be masked; {MAX_IDLE_SHARE:.1%} are possible"
    return None


# -- candidates ------------------------------------------------------------------------------------


def _flat_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    for warps in (1, 2, 4, 8):
        for elements in (1, 2, 4, 8, 16):
            yield KernelPlan("thread", 1, (WARP_SIZE * warps * elements,), warps)


def _dot_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    for warps in (1, 2, 4, 8):
        yield KernelPlan("matrix", 1, (max_matrix_lanes(schedule),), warps)
    tiling = find_sequence_tiling(schedule)
    if isinstance(tiling, str):
        # One plan, so that the reason is reported once.
        lanes = MIN_TILE_POSITIONS * max_lanes_per_position(schedule, 0)
        yield KernelPlan("turned", 1, (lanes,), 1)
        return
    for positions in (MIN_TILE_POSITIONS, 2 * MIN_TILE_POSITIONS, 4 * MIN_TILE_POSITIONS):
        lanes = positions * max_lanes_per_position(schedule, tiling.group)
        for warps in (1, 2, 4):
            yield KernelPlan("turned", 1, (lanes,), warps)


def _row_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    for chunks, warps, rows in _register_tiles(schedule):
        scheme: Scheme = "warp" if rows >= warps else "block"
        yield KernelPlan(scheme, rows, chunks, warps)
    for plan in _loop_plans(schedule):
        yield from (plan, replace(plan, async_copies=True))
        wide = schedule.column_count >= MIN_WIDE_COLUMNS
        if plan.rows == 1 and wide and find_peeling(schedule):
            peeled = replace(plan, peeled=True)
            yield from (peeled, replace(peeled, async_copies=True))
    yield from _shared_plans(schedule)


def _dual_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    """Plans for reductions over rows beside reductions over columns."""
    for chunks, warps, rows in _register_tiles(schedule):
        for splits in _split_counts(schedule.count(schedule.reduced_rows), rows, MAX_ROW_GROUPS):
            plan = KernelPlan("column", rows, chunks, warps, splits)
            yield from (plan, replace(plan, async_copies=True))


def _register_tiles(schedule: Schedule) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Chunks, warps and rows of tiles that hold whole rows in registers."""
    columns = schedule.column_count
    cuts = [(next_power_of_two(columns),), mixed_chunks(columns)]
    if columns >= MIN_WIDE_COLUMNS:
        cuts.insert(1, equal_chunks(columns))
    for chunks in dict.fromkeys(cuts):
        for warps in (1, 2, 4, 8, 16, 32):
            for rows in (1, 2, 4, 8, 16, 32, 64):
                yield chunks, warps, rows


def _loop_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    """Plans with loops over the columns of a row."""
    columns = schedule.column_count
    tiles = [(rows, width) for width in (256, 1024, 4096) for rows in (1, 4, 16, 64)]
    if schedule.is_column_major:
        # Whole cache lines of a few columns: reductions over contiguous rows read nothing else.
        tiles += [(64, 32), (128, 32)]
    if columns >= MIN_LONG_COLUMNS and not schedule.is_column_major:
        yield KernelPlan("looped", 1, (LONG_LOOP_WARPS * WARP_SIZE * 8,), LONG_LOOP_WARPS)
    for rows, width in tiles:
        if width * 2 > columns and width > 256:
            continue
        warps = min(MAX_LOOP_WARPS, max(1, rows * width // (WARP_SIZE * 8)))
        yield KernelPlan("looped", rows, (width,), warps)
        for splits in _split_counts(columns, width, MAX_SPLITS):
            if splits > 1:
                yield KernelPlan("split", rows, (width,), warps, splits)


def _shared_plans(schedule: Schedule) -> Iterator[KernelPlan]:
    """Plans that keep values of a row in shared memory; the row has at least two chunks."""
    options = [
        (rematerialized, async_copies, peeled)
        for peeled in ((False, True) if find_peeling(schedule) else (False,))
        for async_copies in (False, True)
        for rematerialized in range(len(rematerialization_options(schedule, async_copies, peeled)))
    ]
    for option in options:
        for warps in (4, 8, 16, 32):
            for elements in (8, 16):
                width = WARP_SIZE * warps * elements
                if width < schedule.column_count:
                    yield KernelPlan("shared", 1, (width,), warps, 1, *option)


def _split_counts(count: int, step: int, most: int) -> list[int]:
    """Into how many groups of full ``step``s ``count`` rows or columns may be split."""
    limit = min(most, -(-count // step))
    return [splits for splits in (1, 4, 16, 64, 256, 512) if splits <= limit]


CANDIDATES: Mapping[ScheduleKind, Callable[[Schedule], Iterator[KernelPlan]]] = {
    "flat": _flat_plans,
    "rows": _row_plans,
    "dual": _dual_plans,
    "dots": _dot_plans,
}
"""The candidate plans of each kind of schedule, in the order in which they are modelled."""
