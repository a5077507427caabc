"""Which plans of a kernel are worth measuring, and what measurements say: nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, illegal_reason, plans
from nostall.fusion.codegen.tiling.plan_variants import single_chunk_plans, with_eager_loads

MAX_SLOWDOWN = 1.5
"""Plans that would take this many times as long as the first choice, *modelled*, do not run."""


MIN_GAIN = 1.001
"""Gains that are smaller are not looked at again."""
LAZY_CANDIDATES = 4
"""In a race of more plans as many as there are more run a second time, as early ones."""


def candidates(schedule: Schedule, most: int) -> tuple[KernelPlan, ...]:
    """The :func:`fastest_modelled` of the model, its first choice first, and the first ones again where
    they can be :func:`~nostall.fusion.codegen.tiling.plan_variants.with_eager_loads`.  Raises :class:`BadInput` where no plan
    is legal."""
    times = {plan: modelled_seconds(schedule, plan) for plan in plans(schedule).legal}
    if not times:
        return (default_plan(schedule),)
    found = fastest_modelled(times, most)
    twins = [twin for plan in found if (twin := with_eager_loads(schedule, plan)) is not None]
    return (*found, *twins[: max(0, most - LAZY_CANDIDATES)])


def neighbours(schedule: Schedule, plan: KernelPlan) -> tuple[KernelPlan, ...]:
    """The plans that differ from one in a single respect: half or twice its rows, warps or columns
    of a turn, the next number of parts, another cut of a row, copied ahead or not, early or not,
    streamed or not; and the ones of its rows
    :func:`~nostall.fusion.codegen.tiling.plan_variants.single_chunk_plans`, early or not."""
    legal = plans(schedule).legal
    every = (
        replace(other, eager_loads=is_early, evict_first=is_streamed)
        for is_streamed, is_early in product((False, True), repeat=2)
        for other in legal
    )
    near = [
        other
        for other in every
        if _plan_distance(plan, other) == 1 and illegal_reason(schedule, other) is None
    ]
    for wide in single_chunk_plans(schedule, plan):
        twins = (replace(wide, eager_loads=False), replace(wide, eager_loads=True))
        near += [one for one in twins if one not in near and illegal_reason(schedule, one) is None]
    return tuple(near)


def _plan_distance(one: KernelPlan, other: KernelPlan) -> int:
    """In how many respects two plans differ; 2 for more than a step in one of them."""
    kinds = {(_scheme_family(plan), plan.rematerialized, plan.peeled) for plan in (one, other)}
    if len(kinds) > 1:
        return 2
    # Two numbers, and by what factor the next one is another; of parts there are few.
    counts = [
        (one.rows, other.rows, 2),
        (one.num_warps, other.num_warps, 2),
        (one.splits, other.splits, 4),
    ]
    turns = len(one.chunks) == len(other.chunks) == 1
    if turns:
        counts.append((one.chunks[0], other.chunks[0], 2))
    if any(max(a, b) > step * min(a, b) for a, b, step in counts):
        return 2
    flags = (
        not turns and one.chunks != other.chunks,
        one.async_copies != other.async_copies,
        one.eager_loads != other.eager_loads,
        one.evict_first != other.evict_first,
    )
    return sum(a != b for a, b, _ in counts) + sum(flags)


def _scheme_family(plan: KernelPlan) -> str:
    """The scheme; rows in registers are one, whatever has more of them: rows or warps."""
    return "held" if plan.scheme in ("warp", "block") else plan.scheme


def fastest_modelled(times: Mapping[KernelPlan, float], most: int) -> tuple[KernelPlan, ...]:
    """The plan with the least time of every scheme and the ``most`` with the least time of all,
    fastest first.

    Plans that differ in rows, or warps, or parts alone are candidates of their own: which of them
    is faster the model knows least.
    """
    ranked = sorted(times, key=lambda plan: (times[plan], plan.rows, str(plan)))
    ranked = [plan for plan in ranked if times[plan] <= MAX_SLOWDOWN * times[ranked[0]]]
    of_schemes = {plan.scheme: plan for plan in reversed(ranked)}
    kept = {*of_schemes.values(), *ranked[:most]}
    return tuple(plan for plan in ranked if plan in kept)


def most_promising(samples: Sequence[Sequence[float]]) -> int:
    """Which of several candidates is worth a comparison beside the first one alone: the one with
    the largest gain, if that is :data:`MIN_GAIN` and more than the null's; 0 where none is.

    ``samples`` as for :func:`fastest_measured`, whose intervals are wide where many candidates share the
    time: what they leave open a longer comparison answers.
    """
    first, *others, null = samples
    gains = [median(a / b for a, b in zip(first, other, strict=True)) for other in others]
    best = max(range(len(gains)), key=gains.__getitem__)
    beside = median(a / b for a, b in zip(first, null, strict=True))
    return best + 1 if gains[best] > max(MIN_GAIN, beside) else 0


def fastest_measured(samples: Sequence[Sequence[float]], kind: Kind) -> int:
    """Which of several candidates runs: the first one, unless another is faster by the rules of all
    comparisons (its whole interval above 1 and above the null).

    ``samples`` were taken in turns; the last row is the first candidate once more, the null.
    """
    first, *others, null = samples
    best, gain = 0, 1.0
    for at, other in enumerate(others, 1):
        found = Comparison.from_samples(first, other, null, kind=kind)
        if found.verdict == "faster" and found.ratio > gain:
            best, gain = at, found.ratio
    return best
