"""The space of attention plans and its objective."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nostall.core.errors import BadInput
from nostall.core.measurement import Kind
from nostall.gpu.clock import Run, Samples
from nostall.serving.attention.config import WIDE_HEAD_KERNEL, AttentionPlan
from nostall.serving.attention.rules import DECODE, PLANS, VERIFY
from nostall.serving.attention.space import PlanObjective, PlanSpace, plan_fields, plan_of
from nostall.serving.tables.orders import ORDERS
from nostall.serving.tables.settings import DEVICE_ORDERS
from nostall.testing.space import check_space

SPACE = PlanSpace([DECODE, VERIFY, WIDE_HEAD_KERNEL])


def test_the_space_keeps_its_contract() -> None:
    check_space(SPACE, steps=20)


def test_every_plan_has_an_order_that_its_schedule_can_run() -> None:
    state = SPACE.start()
    for move in SPACE.moves(state):
        plan = SPACE.apply(state, move)
        assert plan.kernel.schedule != "unit"
        assert ORDERS[plan.order].is_persistent or plan.kernel.schedule == "queue"
        assert plan.tile_set.heights == tuple(tile.rows for tile in plan.kernel.tiles)


@pytest.mark.parametrize("plan", PLANS.values())
def test_plans_survive_a_file(plan: AttentionPlan) -> None:
    assert SPACE.load(SPACE.dump(plan)) == plan


def test_a_stored_plan_has_its_front_share_as_front() -> None:
    stored = {
        "kernel": {"tiles": [[16, 64, 4, "branch"]], "warps": 4, "front": 0.25},
        "order": "paired",
    }
    plan = plan_of(stored)
    assert plan.kernel.front_share == 0.25
    fields = plan_fields(plan)
    assert fields["kernel"]["front"] == 0.25 and "front_share" not in fields["kernel"]
    assert plan_of(json.loads(json.dumps(fields))) == plan


@pytest.mark.parametrize(
    "text", ["{}", '{"kernel": {}}', '{"kernel": {"tiles": [[1, 2, 3, 4, 5]]}}']
)
def test_damaged_plans(text: str) -> None:
    with pytest.raises(BadInput, match="its fields are kernel, order"):
        plan_of(json.loads(text))


def test_a_space_without_kernels() -> None:
    with pytest.raises(BadInput, match="no kernel"):
        PlanSpace([])


def test_the_rules_of_prefix_groups_are_searched_where_batches_have_groups() -> None:
    def parts(space: PlanSpace) -> set[str]:
        return {move.part for move in space.moves(space.start())}

    grouped = PlanSpace([DECODE, VERIFY], has_prefixes=True)
    assert parts(grouped) - parts(SPACE) == {"least_prefix", "least_saved_ns"}
    assert {order for _, order, _ in grouped.choices["schedule"]} <= set(DEVICE_ORDERS)
    plan = replace(grouped.start(), least_saved_ns=0)
    assert plan.tile_set.least_saved_ns == 0
    check_space(grouped, steps=20)


class CountingClock:
    """Gives run number i the time i + 1."""

    name = "fake"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        return [[index + 1.0] * 3 for index in range(len(runs))]


def test_a_plan_that_fails_is_a_failed_measurement() -> None:
    plans = list(PLANS.values())[:3]

    def make_run(plan: AttentionPlan) -> Run:
        if plan is plans[1]:
            raise ValueError("wrong result: relative error 0.5")
        return lambda: None

    found = PlanObjective(make_run, CountingClock(), {"gpu": "none"}).evaluate(plans)
    assert [measurement.value for measurement in found] == [1.0, float("inf"), 2.0]
    assert found[1].failure == "ValueError: wrong result: relative error 0.5"
