"""Search a plan for one kind of batch, and confirm that it is faster than the rule's plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nostall.core.measurement import Comparison
from nostall.core.search import Budget
from nostall.gpu.clock import Clock, Run
from nostall.search import make
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.attention.space import FAILURES, PlanObjective, PlanSpace

CONFIRMATIONS = 2
"""Comparisons with the rule's plan, each with fresh runs, that must all say faster."""
CONFIRM_SECONDS, TRIAL_SECONDS = 1.0, 0.1
"""About how long a comparison takes, and the measurement of one plan of the search."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    plan: AttentionPlan | None
    """The winner; None if no plan is surely faster than the rule's."""
    comparison: Comparison | None
    """The last confirmation, also of a plan that was not confirmed."""
    samples: list[list[float]]
    evaluations: int


def search_plan(
    space: PlanSpace,
    make_run: Callable[[AttentionPlan], Run],
    clock: Clock,
    budget: Budget,
    seed: int = 0,
) -> Found:
    """Search the space within a budget; the winner is compared with the start, the rule's plan."""
    rule = space.start()
    objective = PlanObjective(make_run, clock, {"clock": clock.name}, TRIAL_SECONDS)
    result = make("anneal").run(space, objective, budget, seed=seed)
    best, evaluations = result.best, result.evaluations
    if best == rule or result.best_measurement.failure is not None:
        return Found(None, None, [], evaluations)
    comparison: Comparison | None = None
    samples: list[list[float]] = []
    for _ in range(CONFIRMATIONS):
        try:
            runs = [make_run(rule), make_run(best), make_run(rule)]
        except FAILURES:
            return Found(None, comparison, samples, evaluations)
        samples = clock.samples("confirmation", runs, CONFIRM_SECONDS)
        comparison = Comparison.from_samples(*samples, kind=clock.kind)
        if comparison.verdict != "faster":
            return Found(None, comparison, samples, evaluations)
    return Found(best, comparison, samples, evaluations)
