"""Which plans of a kernel are worth measuring, and what measurements say: nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.codegen.choice import first_choice, modelled_seconds
from nostall.fusion.codegen.plan import KernelPlan, early, plans
from nostall.fusion.codegen.schedule import Schedule

HOPELESS = 1.5
"""Plans that would take this many times as long as the first choice, *modelled*, do not run."""


FEW = 4
"""In a race of more plans as many as there are more run a second time, with what all rows share
read early."""


def candidates(of: Schedule, most: int) -> tuple[KernelPlan, ...]:
    """The :func:`favourites` of the model, its first choice first, and the first ones again where
    they can be :func:`~nostall.fusion.codegen.plan.early`.  Raises :class:`BadInput` where no plan
    is legal."""
    times = {plan: modelled_seconds(of, plan) for plan in plans(of).legal}
    if not times:
        return (first_choice(of),)
    found = favourites(times, most)
    twins = [twin for plan in found if (twin := early(of, plan)) is not None]
    return (*found, *twins[: max(0, most - FEW)])


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


def fastest(samples: Sequence[Sequence[float]], kind: Kind) -> int:
    """Which of several candidates runs: the first one, unless another is faster by the rules of all
    comparisons (its whole interval above 1 and above the null).

    ``samples`` were taken in turns; the last row is the first candidate once more, the null.
    """
    first, *others, null = samples
    best, gain = 0, 1.0
    for at, other in enumerate(others, 1):
        found = Comparison.of(first, other, null, kind=kind)
        if found.verdict == "faster" and found.ratio > gain:
            best, gain = at, found.ratio
    return best
