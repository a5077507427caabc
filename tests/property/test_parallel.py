"""The simulator and the planners on random problems: what must hold for all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from benchmarks.parallel.instances import LAYOUTS, random_chain, random_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.planners.neighbourhood import PlanSpace
from nostall.parallel.simulate import (
    Timeline,
    costs,
    critical_path_s,
    load_bound_s,
    simulate,
    simulated_s,
)
from nostall.parallel.simulate.orders import caps
from nostall.testing import check_space

ORDERS: tuple[Policy, ...] = ("gpipe", "pa", "pb", "1f1b", "list", "zero-bubble")
ROUNDING = 1e-9


@st.composite
def planned(draw: st.DrawFn, orders: tuple[Policy, ...] = ORDERS) -> tuple[Workload, Plan]:
    """A workload and any legal plan for it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gpus = draw(st.integers(1, 6))
    profile = random_chain(draw(st.integers(gpus, 8)), rng)
    cluster = random_cluster(gpus, draw(st.sampled_from(LAYOUTS)), rng)
    work = Workload(profile, cluster, draw(st.integers(1, 12)))
    count = draw(st.integers(1, gpus))
    inner = sorted(rng.choice(np.arange(1, len(profile)), count - 1, replace=False).tolist())
    order = rng.permutation(gpus).tolist()
    ends = sorted(rng.choice(np.arange(1, gpus + 1), count, replace=False).tolist())
    groups = [tuple(order[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    cuts = [0, *inner, len(profile)]
    stages = tuple(Stage(a, b, g) for a, b, g in zip(cuts[:-1], cuts[1:], groups, strict=True))
    policy = draw(st.sampled_from(orders))
    limits = None
    if draw(st.booleans()):
        limits = tuple(int(k) for k in rng.integers(1, 9, count))
    return work, Plan(stages, policy, limits, draw(st.booleans()))


@given(planned())
@settings(max_examples=150, deadline=None)
def test_no_plan_beats_its_bounds(given: tuple[Workload, Plan]) -> None:
    work, plan = given
    seconds = simulated_s(work, plan)
    assert seconds >= critical_path_s(work, plan) * (1 - ROUNDING)
    assert seconds >= load_bound_s(work, plan) * (1 - ROUNDING)


@given(planned())
@settings(max_examples=100, deadline=None)
def test_timelines_are_legal(given: tuple[Workload, Plan]) -> None:
    """Everything runs once, after what it needs; no worker and no link does two things at once."""
    work, plan = given
    found = simulate(work, plan)
    _check_order(found)
    _check_resources(found)
    limits = caps(plan, work.micro_batches)
    assert all(held <= limit for held, limit in zip(found.held, limits, strict=True))


def _check_order(found: Timeline) -> None:
    starts = found.starts
    kinds = (0, 1, 2) if found.split else (0, 1)
    assert (starts[list(kinds)] >= 0).all()
    ends = starts + found.durations[:, :, None]
    stages = starts.shape[1]
    back = found.sent[stages - 1 : 2 * (stages - 1)]
    for s in range(stages - 1):
        onward, back_s = found.costs.onward[s].seconds, found.costs.back[s].seconds
        assert (found.sent[s] >= ends[0, s]).all()
        assert (starts[0, s + 1] >= found.sent[s] + onward - ROUNDING).all()
        assert (back[s] >= ends[1, s + 1]).all()
        assert (starts[1, s] >= back[s] + back_s - ROUNDING).all()
    assert (starts[1] >= ends[0] - ROUNDING).all()
    if found.split:
        assert (starts[2] >= ends[1] - ROUNDING).all()
    last = ends[2 if found.split else 1, :, -1]
    assert (found.sent[2 * (stages - 1) :, 0] >= last - ROUNDING).all()


def _check_resources(found: Timeline) -> None:
    busy: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for kind in range(3 if found.split else 2):
        for s, worker in enumerate(found.costs.worker):
            seconds = float(found.durations[kind, s])
            mine = busy.setdefault(("worker", worker), [])
            mine += [(float(t), float(t) + seconds) for t in found.starts[kind, s]]
    transfers = (*found.costs.onward, *found.costs.back, *found.costs.allreduce)
    for transfer, sent in zip(transfers, found.sent, strict=True):
        for resource, seconds in transfer.loads:
            mine = busy.setdefault(("link", resource), [])
            mine += [(float(t), float(t) + seconds) for t in sent if t >= 0]
    for times in busy.values():
        times.sort()
        for (_, end), (start, _) in itertools.pairwise(times):
            assert start >= end - ROUNDING


@given(planned(("list",)))
@settings(max_examples=200, deadline=None)
def test_list_orders_keep_the_bound(given: tuple[Workload, Plan]) -> None:
    """T <= (M + 4 S - 4) C, C the largest load per micro-batch of a stage or boundary, plus the
    all-reduces: without limits on what is held, as in SPP."""
    work, plan = given
    m, stages = work.micro_batches, len(plan.stages)
    plan = Plan(plan.stages, "list", (m,) * stages, plan.recompute)
    found = costs(work, plan)
    half = work.cluster.duplex == "half"
    loads = [f + b for f, b in zip(found.forward, found.backward, strict=True)]
    shared: dict[int, float] = {}
    for transfer in (*found.onward, *found.back):
        loads.append(transfer.seconds * (2 if half else 1))
        for resource, seconds in transfer.loads:
            shared[resource] = shared.get(resource, 0.0) + seconds
    largest = max(*loads, *shared.values(), 0.0)
    reduces = sum(t.seconds for t in found.allreduce)
    assert simulated_s(work, plan) <= (m + 4 * stages - 4) * largest + reduces + ROUNDING


@given(st.integers(0, 10_000), st.sampled_from(LAYOUTS))
@settings(max_examples=8, deadline=None)
def test_nostall_is_never_worse_than_the_others(seed: int, layout: str) -> None:
    rng = np.random.default_rng(seed)
    work = Workload(random_chain(6, rng), random_cluster(4, layout, rng), 6)
    effort = Effort(seconds=60, evaluations=60)
    mine = simulated_s(work, make_plan(work, "nostall", effort))
    for name in PLANNERS:
        if name != "exhaustive":
            other = simulated_s(work, make_plan(work, name, effort))
            assert mine <= other * (1 + ROUNDING), name


@pytest.mark.parametrize("policy", ["pb", "zero-bubble"])
def test_plans_are_a_space(policy: Policy) -> None:
    rng = np.random.default_rng(3)
    work = Workload(random_chain(5, rng), random_cluster(3, "two servers", rng), 4)
    first = Plan((Stage(0, 2, (0,)), Stage(2, 5, (1, 2))), policy)
    check_space(PlanSpace(work, first))
