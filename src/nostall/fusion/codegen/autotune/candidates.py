"""Which plans of a kernel are worth measuring, and what measurements say: nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.codegen.cost.default_plan import first_choice, modelled_seconds
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, plans, refusal
from nostall.fusion.codegen.tiling.plan_variants import early, in_one_chunk

HOPELESS = 1.5
"""Plans that would take this many times as long as the first choice, *modelled*, do not run."""


WORTH = 1.001
"""Gains that are smaller are not looked at again."""
FEW = 4
"""In a race of more plans as many as there are more run a second time, as early ones."""


def candidates(of: Schedule, most: int) -> tuple[KernelPlan, ...]:
    """The :func:`favourites` of the model, its first choice first, and the first ones again where
    they can be :func:`~nostall.fusion.codegen.tiling.plan_variants.early`.  Raises :class:`BadInput` where no plan
    is legal."""
    times = {plan: modelled_seconds(of, plan) for plan in plans(of).legal}
    if not times:
        return (first_choice(of),)
    found = favourites(times, most)
    twins = [twin for plan in found if (twin := early(of, plan)) is not None]
    return (*found, *twins[: max(0, most - FEW)])


def neighbours(of: Schedule, plan: KernelPlan) -> tuple[KernelPlan, ...]:
    """The plans that differ from one in a single respect: half or twice its rows, warps or columns
    of a turn, the next number of parts, another cut of a row, copied ahead or not, early or not,
    streamed or not; and the ones of its rows
    :func:`~nostall.fusion.codegen.tiling.plan_variants.in_one_chunk`, early or not."""
    legal = plans(of).legal
    every = (
        replace(other, early=is_early, streamed=is_streamed)
        for is_streamed, is_early in product((False, True), repeat=2)
        for other in legal
    )
    near = [other for other in every if _apart(plan, other) == 1 and refusal(of, other) is None]
    for wide in in_one_chunk(of, plan):
        twins = (replace(wide, early=False), replace(wide, early=True))
        near += [one for one in twins if one not in near and refusal(of, one) is None]
    return tuple(near)


def _apart(one: KernelPlan, other: KernelPlan) -> int:
    """In how many respects two plans differ; 2 for more than a step in one of them."""
    kinds = {(_kind(plan), plan.demoted, plan.peeled) for plan in (one, other)}
    if len(kinds) > 1:
        return 2
    # Two numbers, and by what factor the next one is another; of parts there are few.
    counts = [
        (one.rows, other.rows, 2),
        (one.num_warps, other.num_warps, 2),
        (one.parts, other.parts, 4),
    ]
    turns = len(one.chunks) == len(other.chunks) == 1
    if turns:
        counts.append((one.chunks[0], other.chunks[0], 2))
    if any(max(a, b) > step * min(a, b) for a, b, step in counts):
        return 2
    flags = (
        not turns and one.chunks != other.chunks,
        one.ahead != other.ahead,
        one.early != other.early,
        one.streamed != other.streamed,
    )
    return sum(a != b for a, b, _ in counts) + sum(flags)


def _kind(plan: KernelPlan) -> str:
    """The scheme; rows in registers are one, whatever has more of them: rows or warps."""
    return "held" if plan.scheme in ("warp", "block") else plan.scheme


def favourites(times: Mapping[KernelPlan, float], most: int) -> tuple[KernelPlan, ...]:
    """The plan with the least time of every scheme and the ``most`` with the least time of all,
    fastest first.

    Plans that differ in rows, or warps, or parts alone are candidates of their own: which of them
    is faster the model knows least.
    """
    ranked = sorted(times, key=lambda plan: (times[plan], plan.rows, str(plan)))
    ranked = [plan for plan in ranked if times[plan] <= HOPELESS * times[ranked[0]]]
    of_schemes = {plan.scheme: plan for plan in reversed(ranked)}
    kept = {*of_schemes.values(), *ranked[:most]}
    return tuple(plan for plan in ranked if plan in kept)


def likeliest(samples: Sequence[Sequence[float]]) -> int:
    """Which of several candidates is worth a comparison beside the first one alone: the one with
    the largest gain, if that is :data:`WORTH` and more than the null's; 0 where none is.

    ``samples`` as for :func:`fastest`, whose intervals are wide where many candidates share the
    time: what they leave open a longer comparison answers.
    """
    first, *others, null = samples
    gains = [median(a / b for a, b in zip(first, other, strict=True)) for other in others]
    best = max(range(len(gains)), key=gains.__getitem__)
    beside = median(a / b for a, b in zip(first, null, strict=True))
    return best + 1 if gains[best] > max(WORTH, beside) else 0


def fastest(samples: Sequence[Sequence[float]], kind: Kind) -> int:
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
