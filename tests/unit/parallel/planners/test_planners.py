"""Planners: the closed form, their plans, memory limits, and optima of small workloads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.parallel.instances import small_problem

from nostall.parallel.cluster import load_cluster
from nostall.parallel.errors import BadPlan, BadProfile, Infeasible
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.planners.baselines import count_mappings, mappings
from nostall.parallel.planners.closed_form import closed_form
from nostall.parallel.planners.cut_positions import balanced_cuts, candidate_cuts
from nostall.parallel.planners.dapple import place
from nostall.parallel.planners.nostall import PlanSpace
from nostall.parallel.planners.spp import device_order
from nostall.parallel.profile import load_profile
from nostall.parallel.simulate import simulated_s
from tests.unit.parallel.cases import pipeline, profile, servers, straight

CLUSTERS = Path(__file__).parents[4] / "examples" / "clusters"


def quick() -> Effort:
    """Limits of which the time limit is never reached."""
    return Effort(seconds=600, evaluations=300)


def test_closed_form_equals_a_calculation_by_hand() -> None:
    """Equations 1, 2 and algorithm 1: the pivot stage is the heavier first stage."""
    work = Workload(profile(3, boundary=1e9), servers(3, 1, between=10), 5)
    plan = straight([2, 3], "pb")
    latency = closed_form(work, plan)
    # Forward and backward seconds: stages (2, 4) and (1, 2), the boundary (0.1, 0.1).
    assert latency.pivot == 0
    assert latency.warm_up_s == pytest.approx(2)
    assert latency.steady_s == pytest.approx(4 * 6)
    assert latency.ending_s == pytest.approx(4)


@pytest.mark.parametrize("micro_batches", [8, 16])
def test_closed_form_agrees_with_simulated_pb_if_transfers_are_short(micro_batches: int) -> None:
    work = Workload(profile(4, boundary=1e8), servers(4, 1, between=10), micro_batches)
    plan = straight([1, 2, 3, 4], "pb")
    assert closed_form(work, plan).total_s == pytest.approx(simulated_s(work, plan), rel=0.02)


def test_placement_rules() -> None:
    cluster = servers(3, 4)
    assert place(cluster, (2, 0, 0), 3, "fresh first") == (0, 3, 0)
    assert place(cluster, (2, 0, 0), 3, "append first") == (2, 1, 0)
    assert place(cluster, (2, 1, 0), 4, "scatter first") == (2, 2, 0)
    assert place(cluster, (0, 0, 0), 4, "scatter first") == (2, 1, 1)


def test_minimum_cuts_keep_servers_together() -> None:
    order = device_order(servers(2, 4, inside=100, between=1))
    assert {frozenset(order[:4]), frozenset(order[4:])} == {
        frozenset(range(4)),
        frozenset(range(4, 8)),
    }
    order = device_order(load_cluster(CLUSTERS / "uneven-8.toml"))
    position = {gpu: i for i, gpu in enumerate(order)}
    assert all(abs(position[a] - position[b]) == 1 for a, b in ((0, 4), (1, 5), (3, 7)))


def test_every_mapping_is_counted_once() -> None:
    for layers, gpus in ((1, 1), (3, 2), (4, 3)):
        listed = list(mappings(layers, gpus))
        assert len(listed) == len(set(listed)) == count_mappings(layers, gpus)


def test_merged_layers_keep_the_cuts_that_few_bytes_cross() -> None:
    work = pipeline(8, 2)
    assert candidate_cuts(work, 8) == list(range(8))
    long = profile(1000, boundary=5.0)
    tensors = tuple(
        t if t.producer % 10 else type(t)(t.producer, t.last_consumer, 1.0) for t in long.tensors
    )
    merged = candidate_cuts(
        Workload(type(long)("x", long.layers, tensors, 1), servers(1, 2), 2), 50
    )
    assert len(merged) <= 50 and merged[0] == 0 and merged == sorted(set(merged))
    assert np.mean([(cut - 1) % 10 == 0 for cut in merged[1:]]) == 1.0


@pytest.mark.parametrize("planner", [p for p in PLANNERS if p != "exhaustive"])
def test_planners_keep_all_gpus_busy_if_links_are_free(planner: str) -> None:
    """Four equal layers on four GPUs, with links that take no time."""
    work = Workload(profile(4, parameters=1.0), servers(1, 4), 64)
    evaluation = evaluate_plan(work, make_plan(work, planner, quick()), planner)
    assert evaluation.speedup > 3.7
    assert evaluation.timeline.iteration_s >= work.sequential_s / 4


def test_heavy_parameters_at_the_end_get_few_replicas() -> None:
    """DAPPLE's VGG case: convolutions are replicated, the fully connected tail is on one GPU."""
    layers = profile(6, forward=1.0, backward=2.0, boundary=1e6, parameters=1e6)
    tail = type(layers.layers[0])("fc", 0.2, 0.4, 4e9, 1.0)
    work = Workload(
        type(layers)("vgg", (*layers.layers[:5], tail), layers.tensors, 1),
        servers(1, 8, inside=0.1),
        32,
        fractions=True,
    )
    for planner in ("dapple", "spp", "nostall"):
        plan = make_plan(work, planner, quick())
        assert len(plan.stages[-1].gpus) == 1
        assert len(plan.stages[0].gpus) >= 5
        assert simulated_s(work, plan) < simulated_s(work, make_plan(work, "data-parallel"))


def test_nostall_is_close_to_the_optimum() -> None:
    gaps = []
    for seed in range(5):
        work, _ = small_problem(seed)
        optimum = simulated_s(work, make_plan(work, "exhaustive", Effort(600)))
        gaps.append(simulated_s(work, make_plan(work, "nostall", Effort(60, 900))) / optimum - 1)
    assert np.median(gaps) <= 0.01
    assert max(gaps) <= 0.05


def test_plans_fit_into_memory() -> None:
    """By limits on micro-batches in flight, by re-computation, or with an error."""
    gib = 2.0**30
    work = Workload(profile(2, stored=3 * gib, boundary=gib / 8), servers(1, 2, memory=4), 8)
    for planner in ("dapple", "spp", "nostall"):
        evaluation = evaluate_plan(work, make_plan(work, planner, quick()), planner)
        assert evaluation.memory.fits is True
    one_gpu = Workload(profile(2, stored=3 * gib, boundary=gib / 8), servers(1, 1, memory=4), 8)
    with pytest.raises(Infeasible, match="memory"):
        make_plan(one_gpu, "dapple", Effort(5, recompute=False))
    heavy = Workload(profile(2, parameters=4 * gib), servers(1, 2, memory=4), 8)
    for planner in PLANNERS:
        with pytest.raises(Infeasible, match="memory"):
            make_plan(heavy, planner, quick())


def test_too_many_stages_and_unknown_names_are_rejected() -> None:
    work = Workload(profile(2), servers(1, 4), 4)
    with pytest.raises(BadPlan, match="needs 4 stages and the profile has 2 layers"):
        make_plan(work, "even")
    with pytest.raises(BadPlan, match="allowed are nostall"):
        make_plan(work, "alpa")
    with pytest.raises(BadPlan, match="use another planner"):
        make_plan(pipeline(30, 4), "exhaustive")


def test_balanced_cuts_give_each_stage_a_layer() -> None:
    work = pipeline(5, 2)
    assert balanced_cuts(work, 5) == [0, 1, 2, 3, 4, 5]
    assert balanced_cuts(work, 2) == [0, 3, 5]


@pytest.mark.skipif(
    "NOSTALL_DAPPLE_PROFILES" not in os.environ,
    reason="set NOSTALL_DAPPLE_PROFILES to a folder with DAPPLE's profiling_results",
)
def test_dapple_plans_bert_large_as_published() -> None:
    """Table 6: half of the layers on each server; figure 12: 14.5x, here modelled within 10 %."""
    folder = Path(os.environ["NOSTALL_DAPPLE_PROFILES"])
    work = Workload(
        load_profile(folder / "bert-24-pbs-6.txt"),
        load_cluster(CLUSTERS / "dapple-a-2x8.toml"),
        128,
    )
    best = evaluate_plan(work, make_plan(work, "dapple"), "dapple")
    assert best.plan.split == "8:8"
    half = (Stage(0, 16, tuple(range(8))), Stage(16, 29, tuple(range(8, 16))))
    published = evaluate_plan(work, Plan(half, "pb"), "published")
    assert published.timeline.iteration_s <= 1.02 * best.timeline.iteration_s
    assert published.speedup == pytest.approx(14.5, rel=0.1)


def test_swaps_and_moves_of_interchangeable_gpus_are_not_offered() -> None:
    """If all links differ, the optimum is found, one swap of GPUs away from a far worse plan.

    If all GPUs are interchangeable, no swap and only one GPU of each stage is offered.
    """
    work, _ = small_problem(98)
    seconds = simulated_s(work, make_plan(work, "nostall", Effort(600, 900)))
    assert seconds <= simulated_s(work, make_plan(work, "exhaustive", Effort(600)))

    interchangeable = pipeline(4, 4)
    space = PlanSpace(interchangeable, Plan((Stage(0, 2, (0, 1)), Stage(2, 4, (2,))), "pb"))
    assert interchangeable.cluster.representatives == (0, 0, 0, 0)
    given = {(m.a, m.b, m.x) for m in space.moves(space.start()) if m.kind == "give"}
    assert given == {(-1, 0, 3), (-1, 1, 3), (0, 1, 0), (0, -1, 0)}
    assert not [m for m in space.moves(space.start()) if m.kind == "swap"]


@pytest.mark.parametrize("planner", [name for name in PLANNERS if name != "exhaustive"])
def test_planners_keep_their_time_limit_with_many_micro_batches(planner: str) -> None:
    """One simulation of this workload takes some 0.1 s, and the planners want hundreds."""
    workload = Workload(profile(24, boundary=1e6), servers(1, 8), 4000, 1)
    make_plan(workload, planner, Effort(seconds=0.001))  # compiles the simulator
    start = time.monotonic()
    make_plan(workload, planner, Effort(seconds=0.2))
    assert time.monotonic() - start < 2.5


def test_the_time_limit_holds_for_a_cluster_of_many_gpus() -> None:
    """A planner has a plan at its limit, at worst a cheap one; most of its work is left out."""
    work = Workload(profile(6), servers(100, 8, inside=100, between=10), 1000)
    for planner in ("nostall", "dapple", "spp", "pipedream"):
        assert make_plan(work, planner, Effort(seconds=0.0)).stages
    assert len(work._routes) < 10_000  # all of them are 80,000


def test_too_many_plans_to_count_are_refused() -> None:
    work = Workload(profile(6), servers(125, 8, inside=100, between=10), 8)
    with pytest.raises(BadPlan, match=r"there are more than 2\^1000 plans"):
        make_plan(work, "exhaustive")


def test_an_exhaustive_search_says_that_its_limit_ended_it() -> None:
    workload = Workload(profile(8), servers(1, 4), 8)
    with pytest.raises(BadPlan, match=r"the time limit of 0\.001 s ended the exhaustive search"):
        make_plan(workload, "exhaustive", Effort(seconds=0.001))


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "message"),
    [
        (10**9, 1, "give a larger --micro-batch"),
        (10**400, 1, "allowed are up to"),
        (8, 10**400, "allowed are up to"),
    ],
)
def test_batches_that_cannot_be_simulated(
    global_batch: int, micro_batch: int, message: str
) -> None:
    with pytest.raises(BadProfile, match=message):
        Workload(profile(4), servers(1, 4), global_batch, micro_batch)


@pytest.mark.parametrize("planner", ["dapple", "spp", "nostall"])
def test_without_time_the_error_names_the_limit(planner: str) -> None:
    gib = 2.0**30
    work = Workload(profile(2, stored=30 * gib, boundary=gib / 8), servers(1, 2, memory=4), 8)
    with pytest.raises(Infeasible, match=r"fits? into memory; use more GPUs|smallest of which"):
        make_plan(work, planner, quick())
    with pytest.raises(Infeasible, match="the time limit of 0 s ended the planning before"):
        make_plan(work, planner, Effort(seconds=0.0))
