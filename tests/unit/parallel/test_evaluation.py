"""Notes of a plan's evaluation: what differs from what was asked for, and how sure figures are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.parallel.errors import BadPlan, BadProfile
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.plan_file import load_plan
from nostall.report.plan.summary import sentences
from tests.unit.parallel.cases import profile, servers, straight

TWO_TO_ONE = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), "pb")


def notes(work: Workload, plan: Plan) -> str:
    return "\n".join(evaluate_plan(work, plan, "test").notes())


@pytest.mark.parametrize("share", [float("-inf"), float("nan"), -0.1, 1.5])
def test_a_share_of_the_backward_time_is_between_0_and_1(share: float) -> None:
    with pytest.raises(BadProfile, match=r"weight_gradient_share .* allowed is 0 to 1"):
        Workload(profile(2), servers(1, 2), 8, weight_gradient_share=share)


def test_a_changed_micro_batch_is_said() -> None:
    plan = straight([1, 2])
    uneven = notes(Workload(profile(2), servers(1, 2), 8, 3), plan)
    assert "the 3 micro-batches have 2 to 3 samples" in uneven
    evaluation = evaluate_plan(Workload(profile(2), servers(1, 2), 8, 3), plan, "test")
    assert sentences(evaluation)[0].endswith("3 micro-batches of 2 to 3 samples")
    smaller = notes(Workload(profile(2), servers(1, 2), 6, 4), plan)
    assert "not a multiple of the micro-batch of 4: the 2 micro-batches have 3 samples" in smaller
    assert "micro-batches" not in notes(Workload(profile(2), servers(1, 2), 8, 4), plan)


def test_replicas_without_samples_are_said() -> None:
    work = Workload(profile(2), servers(1, 3), 8, 1)
    assert "2 replicas and micro-batches have 1 samples: replicas without a sample wait" in notes(
        work, TWO_TO_ONE
    )
    with_fractions = notes(replace(work, fractions=True), TWO_TO_ONE)
    assert "fractions of a sample, which no GPU can run" in with_fractions
    assert "replicas" not in notes(Workload(profile(2), servers(1, 3), 8, 2), TWO_TO_ONE)


def test_the_spread_of_a_measured_profile_is_said() -> None:
    def with_spread(spread: float) -> str:
        measured = replace(profile(2), passes=24, spread=spread)
        return notes(Workload(measured, servers(1, 2), 8, 4), straight([1, 2]))

    assert "the median of 24 passes, whose time changed by 3%" in with_spread(0.03)
    assert "measure again" not in with_spread(0.03)
    assert "measure again while nothing else uses the machine" in with_spread(0.4)


def test_a_sharding_plan_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "sharding.json"
    path.write_text('{"nostall_sharding_plan": 1, "planner": "sharding"}')
    with pytest.raises(BadPlan, match="is a sharding plan, and this command needs a pipeline plan"):
        load_plan(path)
