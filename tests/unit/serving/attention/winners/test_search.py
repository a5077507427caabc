"""The search for plans: a winner must be confirmed twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nostall.core.measurement import Kind
from nostall.core.search import Budget
from nostall.gpu.clock import Run, Samples
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.attention.rules import DECODE, PLANS, VERIFY
from nostall.serving.attention.space import PlanSpace
from nostall.serving.attention.winners.search import search_plan

RULE = PLANS["decode"]
BUDGET = Budget(evaluations=60)


class PlanRun:
    """A run that remembers its plan."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan

    def __call__(self) -> None:
        return None


class PlanClock:
    """Times by plan: ``fast`` is how much faster plans with a split of 1024 keys are."""

    name = "fake"
    kind: Kind = "measured"

    def __init__(self, fast: float, confirmed: float) -> None:
        self.fast, self.confirmed = fast, confirmed

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        gain = self.confirmed if graph == "confirmation" else self.fast
        rows = []
        for run in runs:
            assert isinstance(run, PlanRun)
            rows.append([1.0 / gain if run.plan.split == 1024 else 1.0] * 20)
        return rows


@pytest.mark.parametrize(("confirmed", "is_found"), [(1.5, True), (1.0, False), (0.8, False)])
def test_a_winner_is_faster_in_the_confirmations_too(confirmed: float, is_found: bool) -> None:
    space = PlanSpace([DECODE, VERIFY], has_fixed_grid=True)
    found = search_plan(space, RULE, PlanRun, PlanClock(1.5, confirmed), BUDGET)
    assert (found.plan is not None) == is_found
    assert found.comparison is not None
    assert found.comparison.ratio == pytest.approx(confirmed)
    if found.plan is not None:
        assert found.plan.split == 1024
        assert found.plan.kernel.schedule != "unit"


def test_plans_that_fail_are_never_winners() -> None:
    def make_run(plan: AttentionPlan) -> Run:
        if plan.split == 1024:
            raise ValueError("wrong result: relative error 0.5")
        return PlanRun(plan)

    space = PlanSpace([DECODE, VERIFY], has_fixed_grid=True)
    found = search_plan(space, RULE, make_run, PlanClock(1.5, 1.5), BUDGET)
    assert found.plan is None
