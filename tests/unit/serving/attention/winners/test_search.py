"""The search for plans: a winner must be confirmed twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nostall.core.measurement import Kind
from nostall.core.search import Budget
from nostall.gpu.clock import Run, Samples
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.rules import GLUON_PLANS, PLANS
from nostall.serving.attention.winners.on_gpu import rule_space, search_plan
from nostall.testing.space import check_space

RULE = PLANS["decode"]
SPACE = rule_space(RULE, AttentionShape())
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
    found = search_plan(SPACE, PlanRun, PlanClock(1.5, confirmed), BUDGET)
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

    found = search_plan(SPACE, make_run, PlanClock(1.5, 1.5), BUDGET)
    assert found.plan is None


@pytest.mark.parametrize("rule", [*PLANS.values(), *GLUON_PLANS.values()])
def test_the_search_starts_at_the_plan_of_the_rule(rule: AttentionPlan) -> None:
    """If the rule's plan is the fastest, the search ends with it."""

    class RuleClock(PlanClock):
        def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
            plans = [run.plan for run in runs if isinstance(run, PlanRun)]
            return [[1.0 if plan == rule else 2.0] * 20 for plan in plans]

    space = rule_space(rule, AttentionShape())
    assert space.start() == rule
    found = search_plan(space, PlanRun, RuleClock(1.0, 1.0), BUDGET)
    assert (found.plan, found.comparison) == (None, None)
    check_space(space, steps=10)
