"""Plans beside those of :func:`~nostall.fusion.codegen.tiling.kernel_plan.plans`, which only a race takes: the
schedule model does not know what they gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import (
    MAX_WARPS,
    VECTOR_ELEMENTS,
    WARP_SIZE,
    KernelPlan,
    Scheme,
    illegal_reason,
    plans,
)
from nostall.fusion.codegen.tiling.tile_sizes import next_power_of_two


def with_eager_loads(schedule: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan with what all rows share read early, so that no warp waits for it behind a
    reduction, or with everything read at once; None where that is no plan.

    It takes registers, and the schedule model does not know what it gains: the legal ones of
    :func:`plans` are without.
    """
    found = replace(plan, eager_loads=True)
    return found if illegal_reason(schedule, found) is None else None


def single_chunk_plans(schedule: Schedule, plan: KernelPlan) -> tuple[KernelPlan, ...]:
    """The plan with a row in one power of two of lanes, one :data:`VECTOR_ELEMENTS` of columns for each
    thread, and two.

    It may leave nearly half of the lanes idle, so :func:`plans` refuses it; where memory is what
    everybody waits for, that costs nothing, and a thread has one or two loads of each input to wait
    for.  Nothing where rows are in one chunk, or not in registers, or it does not fit.
    """
    if plan.scheme not in ("warp", "block") or len(plan.chunks) == 1:
        return ()
    width = next_power_of_two(schedule.column_count)
    found = []
    for each in (VECTOR_ELEMENTS, 2 * VECTOR_ELEMENTS):
        warps = min(MAX_WARPS, max(1, plan.rows * width // (each * WARP_SIZE)))
        scheme: Scheme = "warp" if plan.rows >= warps else "block"
        found.append(replace(plan, scheme=scheme, chunks=(width,), num_warps=warps))
    return tuple(one for one in dict.fromkeys(found) if illegal_reason(schedule, one) is None)


def with_evict_first(schedule: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan whose outputs larger than L2 leave it first; None where it has none.

    Whoever reads such an output next begins with what is there no more: what a kernel gained alone,
    it also gained with its reader behind it (docs/explanation/codegen.md).
    """
    found = replace(plan, evict_first=True)
    return found if illegal_reason(schedule, found) is None else None


def plans_with_variants(schedule: Schedule) -> Iterator[KernelPlan]:
    """All legal plans, and those that a race may make of them."""
    legal = plans(schedule).legal
    wide = [one for plan in legal for one in single_chunk_plans(schedule, plan)]
    for plan in (*legal, *dict.fromkeys(wide)):
        for one in (plan, with_eager_loads(schedule, plan)):
            if one is not None:
                yield one
                if (other := with_evict_first(schedule, one)) is not None:
                    yield other
