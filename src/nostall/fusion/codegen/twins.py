"""Plans beside those of :func:`~nostall.fusion.codegen.plan.plans`, which only a race takes: the
schedule model does not know what they gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nostall.fusion.codegen.plan import (
    MOST_WARPS,
    VECTOR,
    WARP,
    KernelPlan,
    Scheme,
    plans,
    refusal,
)
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.widths import power_above


def early(of: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan with what all rows share read early, so that no warp waits for it behind a
    reduction, or with everything read at once; None where that is no plan.

    It takes registers, and the schedule model does not know what it gains: the legal ones of
    :func:`plans` are without.
    """
    found = replace(plan, early=True)
    return found if refusal(of, found) is None else None


def in_one_chunk(of: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan with a row in one power of two of lanes, :data:`VECTOR` columns for each thread.

    It may leave nearly half of the lanes idle, so :func:`plans` refuses it; where memory is what
    everybody waits for, that costs nothing, and no thread has more than one load of each input to
    wait for.  None where rows are in one chunk, or not in registers, or it does not fit.
    """
    if plan.scheme not in ("warp", "block") or len(plan.chunks) == 1:
        return None
    width = power_above(of.column_count)
    warps = min(MOST_WARPS, max(1, plan.rows * width // (VECTOR * WARP)))
    scheme: Scheme = "warp" if plan.rows >= warps else "block"
    found = replace(plan, scheme=scheme, chunks=(width,), num_warps=warps)
    return found if refusal(of, found) is None else None


def streamed(of: Schedule, plan: KernelPlan) -> KernelPlan | None:
    """The plan whose outputs larger than L2 leave it first; None where it has none.

    Measured beside a kernel that reads such an output, that one is no slower for it
    (docs/fusion_codegen.md); what is small enough to be found there stays.
    """
    found = replace(plan, streamed=True)
    return found if refusal(of, found) is None else None


def with_twins(of: Schedule) -> Iterator[KernelPlan]:
    """All legal plans, and those that a race may make of them."""
    legal = plans(of).legal
    wide = [one for plan in legal if (one := in_one_chunk(of, plan)) is not None]
    for plan in (*legal, *dict.fromkeys(wide)):
        for one in (plan, early(of, plan)):
            if one is not None:
                yield one
                if (other := streamed(of, one)) is not None:
                    yield other
