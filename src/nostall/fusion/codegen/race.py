"""Which plans of a kernel are worth measuring, and what measurements say: nothing is run here."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.codegen.choice import first_choice, modelled_seconds
from nostall.fusion.codegen.plan import KernelPlan, plans
from nostall.fusion.codegen.schedule import Schedule

HOPELESS = 3.0
"""Plans that would take this many times as long as the first choice, *modelled*, do not run."""


def candidates(of: Schedule, most: int) -> tuple[KernelPlan, ...]:
    """The modelled first choice, then the best plan of every other scheme, then what is missing of
    the ``most`` modelled best among plans that differ in scheme, in warps for each row, in whether
    chunks are equal, or in whether rows are peeled.  Raises :class:`BadInput` where no plan is
    legal."""
    first = first_choice(of)
    time = {plan: modelled_seconds(of, plan) for plan in plans(of).legal}
    ranked = sorted(time, key=lambda plan: (time[plan], plan.rows, str(plan)))
    ranked = [plan for plan in ranked if time[plan] <= HOPELESS * time[first]]
    schemes = {plan.scheme: plan for plan in reversed(ranked)}
    others = sorted(schemes.values(), key=ranked.index)
    kinds = {(p.scheme, p.num_warps / p.rows, p.is_even, p.peeled): p for p in reversed(ranked)}
    best = sorted(kinds.values(), key=ranked.index)[:most]
    return tuple(dict.fromkeys([first, *others, *best]))


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
