"""Plans beside those of :func:`~nostall.fusion.codegen.tiling.kernel_plan.plans`, which only a race takes: the
schedule model does not know what they gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import (
    MOST_WARPS,
    VECTOR,
    WARP,
    KernelPlan,
    Scheme,
    plans,
    refusal,
)
from nostall.fusion.codegen.tiling.tile_sizes import power_above


def early(of: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan with what all rows share read early, so that no warp waits for it behind a
    reduction, or with everything read at once; None where that is no plan.

    It takes registers, and the schedule model does not know what it gains: the legal ones of
    :func:`plans` are without.
    """
    found = replace(plan, early=True)
    return found if refusal(of, found) is None else None


def in_one_chunk(of: Schedule, plan: KernelPlan) -> tuple[KernelPlan, ...]:
    """The plan with a row in one power of two of lanes, one :data:`VECTOR` of columns for each
    thread, and two.

    It may leave nearly half of the lanes idle, so :func:`plans` refuses it; where memory is what
    everybody waits for, that costs nothing, and a thread has one or two loads of each input to wait
    for.  Nothing where rows are in one chunk, or not in registers, or it does not fit.
    """
    if plan.scheme not in ("warp", "block") or len(plan.chunks) == 1:
        return ()
    width = power_above(of.column_count)
    found = []
    for each in (VECTOR, 2 * VECTOR):
        warps = min(MOST_WARPS, max(1, plan.rows * width // (each * WARP)))
        scheme: Scheme = "warp" if plan.rows >= warps else "block"
        found.append(replace(plan, scheme=scheme, chunks=(width,), num_warps=warps))
    return tuple(one for one in dict.fromkeys(found) if refusal(of, one) is None)


def streamed(of: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan whose outputs larger than L2 leave it first; None where it has none.

    Whoever reads such an output next begins with what is there no more: what a kernel gained alone,
    it also gained with its reader behind it (docs/fusion_codegen.md, "The race").
    """
    found = replace(plan, streamed=True)
    return found if refusal(of, found) is None else None


def with_twins(of: Schedule) -> Iterator[KernelPlan]:
    """All legal plans, and those that a race may make of them."""
    legal = plans(of).legal
    wide = [one for plan in legal for one in in_one_chunk(of, plan)]
    for plan in (*legal, *dict.fromkeys(wide)):
        for one in (plan, early(of, plan)):
            if one is not None:
                yield one
                if (other := streamed(of, one)) is not None:
                    yield other
