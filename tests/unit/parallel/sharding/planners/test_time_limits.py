"""Shardings and pipelines of planners that a time limit ends: never slower than the cheap plans."""

from __future__ import annotations

import pytest

from nostall.papers.automap.pipeline import explore_pipeline
from nostall.papers.automap.planner import plan_automap
from nostall.parallel.plan import Workload
from nostall.parallel.sharding.cost.memory import ADAM_STATE_FACTOR
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.hybrid.search import cost_table
from nostall.parallel.sharding.planners.sharding import (
    Options,
    plan_sharding,
    priced_plan,
)
from nostall.report.plan.sharding import sharding_sentences, speedup_sentence
from tests.unit.parallel.cases import profile, servers
from tests.unit.parallel.sharding.steps import captured, prices


@pytest.mark.parametrize("seconds", [1e-6, 0.3])
@pytest.mark.parametrize("model", ["vgg", "wide_classifier"])
def test_a_sharding_is_no_slower_than_the_rules_and_one_gpu(model: str, seconds: float) -> None:
    priced = prices(captured(model, 2), (2,))
    best, rules = plan_sharding(priced, Options(seconds=seconds))
    assert {plan.name for plan in rules} >= {"data-parallel", "fsdp", "replicated"}
    one_gpu = priced_plan("one GPU", priced, replicated(priced.graph), ADAM_STATE_FACTOR)
    automap, _ = plan_automap(priced, Options(seconds=seconds), 0, rules)
    for plan in (best, automap):
        for cheap in (*rules, one_gpu):
            assert plan.whole_s <= cheap.whole_s, cheap.name
        assert any(line.startswith("modelled speed-up") for line in sharding_sentences(plan))


def test_a_sharding_that_is_slower_than_one_gpu_says_so() -> None:
    assert speedup_sentence(0.65).endswith("0.65x over one GPU: this plan is SLOWER than one GPU")
    assert "SLOWER" not in speedup_sentence(1.0) + speedup_sentence(1.0 - 1e-12)


def test_the_pipeline_explorer_has_a_plan_without_time() -> None:
    work = Workload(profile(12, parameters=1.0), servers(2, 4), 8)
    found = explore_pipeline(work, 2, seconds=0.0)
    assert found.cuts == (4,)  # the border between the servers
    assert [len(stage.gpus) for stage in found.plan.stages] == [4, 4]


def test_the_whole_model_is_priced_first() -> None:
    calls: list[tuple[int, int, int]] = []

    def price(first: int, end: int, devices: int) -> float | None:
        calls.append((first, end, devices))
        return 1.0 if len(calls) == 1 else None  # the limit ends the search

    assert cost_table(3, 4, price) == {(0, 3, 4): 1.0}
    assert len(calls) == len(set(calls)) == 1 + 5 * 2
