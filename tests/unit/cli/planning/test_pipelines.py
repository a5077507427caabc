"""Pipelines beside shardings of the whole batch: when they are searched, offered and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from torch import nn  # noqa: E402

from nostall.cli.options.given_options import NO_CONTEXT  # noqa: E402
from nostall.cli.planning import sharding  # noqa: E402
from nostall.cli.planning.hybrid import (  # noqa: E402
    HybridRequest,
    PipelineOffer,
    beside_shardings,
    default_micro_batch,
)
from nostall.cli.planning.sharding import (  # noqa: E402
    ShardingRequest,
    plan_sharding_command,
)
from nostall.cli.terminal.console import Format  # noqa: E402
from nostall.parallel.cluster import parse_cluster  # noqa: E402
from nostall.parallel.errors import Infeasible  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.sharding.capture.operators import capture  # noqa: E402
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh  # noqa: E402
from nostall.parallel.sharding.cost.prices import Prices  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402
from nostall.parallel.sharding.graph import replicated  # noqa: E402
from nostall.parallel.sharding.planners.sharding import (  # noqa: E402
    Options,
    ShardingPlan,
    plan_sharding,
    priced_plan,
)

SAMPLES = 16
RATES = DeviceRates("slow", {"float64": 1e8}, 1e9)
CLUSTER = parse_cluster(
    'name = "slow"\n[[servers]]\ncount = 2\ngpus = 1\nmemory_gib = 1\n'
    "link = { bandwidth_gbytes = 1, latency_us = 1 }\n"
    "[network]\nbandwidth_gbytes = 1e-3\nlatency_us = 1\n"
)
REQUEST = HybridRequest("train.py:build", CLUSTER, RATES, SAMPLES, 4, 2.0)


@pytest.mark.parametrize(
    ("samples", "devices", "expected"),
    [(64, 4, 8), (64, 5, 4), (9, 2, 1), (9, 1, 3), (6, 4, 1), (1, 8, 1), (10, 2, 2)],
)
def test_micro_batches_are_the_fewest_that_keep_all_gpus_busy(
    samples: int, devices: int, expected: int
) -> None:
    found = default_micro_batch(samples, devices)
    assert found == expected
    counts = [n for n in range(2 * devices, samples + 1) if samples % n == 0]
    assert samples // found == min(counts, default=samples)


def _job(*layers: nn.Module) -> Job:
    module = nn.Sequential(*layers).double()
    x = torch.randn(4, 8).double()
    return Job(module, (x,), torch.zeros_like(module(x)).detach(), nn.functional.mse_loss)


def _deep() -> Job:
    torch.manual_seed(0)
    return _job(*(nn.Sequential(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 8)) for _ in range(4)))


def _replicated(job: Job) -> ShardingPlan:
    graph = capture(job, SAMPLES, (2,)).graph
    prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
    return priced_plan("replicated", prices, replicated(graph), 2.0)


@pytest.mark.slow
def test_a_faster_pipeline_is_offered() -> None:
    job = _deep()
    plan = _replicated(job)
    offer = beside_shardings(REQUEST, job, plan, 30.0, quiet=True)
    assert offer.step_s is not None and offer.step_s < plan.step_s
    assert "the fastest plan found of 4 micro-batches, a pipeline, takes" in offer.sentence


@pytest.mark.slow
def test_the_plan_of_the_sentence_is_the_one_that_is_compared() -> None:
    """One layer has no stages; its micro-batches are sharded, and the sentence says why."""
    job = _job(nn.Linear(8, 8))
    offer = beside_shardings(REQUEST, job, None, 30.0, quiet=True)
    assert offer.step_s is not None
    assert "a sharding in one stage, takes" in offer.sentence
    assert "no pipeline was found: the model has one layer" in offer.sentence


def test_without_a_chance_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("pipelines were searched")

    monkeypatch.setattr("nostall.parallel.sharding.hybrid.planner.plan_hybrid", fail)
    job = _deep()
    plan = _replicated(job)
    one = replace(REQUEST, micro_batch=SAMPLES)
    assert "two micro-batches" in beside_shardings(one, job, plan, 30.0, quiet=True).sentence
    ideal = replace(plan, times=replace(plan.times, step_s=plan.step_s / 2))
    offer = beside_shardings(REQUEST, job, ideal, 30.0, quiet=True)
    assert "two stages without any transfer take" in offer.sentence and offer.show is None


@pytest.mark.parametrize(
    ("offered_s", "planned_s", "is_shown"),
    [(1.0, 2.0, True), (2.0, 2.0, False), (3.0, None, True), (None, 2.0, False)],
)
def test_an_offer_is_shown_if_it_is_faster(
    offered_s: float | None, planned_s: float | None, is_shown: bool
) -> None:
    shown: list[Any] = []

    def show(plans: Any, out_file: Path | None, format: Format) -> None:
        shown.append(plans)

    offer = PipelineOffer("", offered_s, show if offered_s is not None else None)
    plan = _replicated(_job(nn.Linear(8, 8)))
    timed = replace(plan, times=replace(plan.times, step_s=planned_s or 0.0))
    plans = [timed] if planned_s is not None else []
    assert offer.shown_if_faster(plans, None, Format.TABLE) == is_shown
    assert shown == ([plans] if is_shown else [])


def test_the_time_is_divided_and_both_reasons_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def no_sharding(request: object, quiet: bool, seconds: float) -> list[ShardingPlan]:
        given.append(seconds)
        raise Infeasible("no sharding fits")

    def no_pipeline(request: object, plans: object, quiet: bool, seconds: float) -> PipelineOffer:
        given.append(seconds)
        return PipelineOffer("pipelines were not planned")

    monkeypatch.setattr(sharding, "_plan", no_sharding)
    monkeypatch.setattr(sharding, "_pipelines", no_pipeline)
    request = ShardingRequest("train.py:build", CLUSTER, None, "h100-dgx", SAMPLES, 2.0, 30.0)
    with pytest.raises(Infeasible, match="no sharding fits; pipelines were not planned"):
        plan_sharding_command(request, None, Format.TABLE, quiet=True, context=NO_CONTEXT)
    assert given[0] == pytest.approx(20)
    assert 10 <= given[1] <= 30


def test_a_pipeline_lists_the_engines_as_candidates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it was faster than shardings of the whole batch, or asked for."""
    job, file = _job(nn.Linear(8, 8)), tmp_path / "plan.json"

    def write(*_: object, **__: object) -> None:
        file.write_text('{"planner": "sharding"}')

    def found(*_: object) -> list[ShardingPlan]:
        graph = capture(job, SAMPLES, (2,)).graph
        prices = Prices(graph, ClusterMesh(CLUSTER, (2,)), RATES)
        return plan_sharding(prices, Options())[1]

    monkeypatch.setattr("nostall.parallel.module.load_job", lambda _: job)
    monkeypatch.setattr(sharding, "device_rates", lambda _: RATES)
    monkeypatch.setattr(sharding, "show_hybrid", write)
    monkeypatch.setattr(sharding, "_plan", found)
    monkeypatch.setattr(sharding, "_pipelines", lambda *_: PipelineOffer("", 1e-9, write))
    request = ShardingRequest("train.py:build", CLUSTER, None, "h100-dgx", SAMPLES, 2.0, 30.0)
    for own in (request, replace(request, micro_batch=4)):
        plan_sharding_command(own, file, Format.TABLE, quiet=True, context=NO_CONTEXT)
        document = json.loads(file.read_text())
        assert {c["engine"] for c in document["candidates"]} == {"ddp", "fsdp2"}
        assert document["planner"] == "sharding"
        file.unlink()
