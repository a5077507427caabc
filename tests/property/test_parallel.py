"""Properties of the simulator and the planners on random workloads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from benchmarks.parallel.instances import LAYOUTS, random_chain, random_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.planners.nostall import PlanSpace
from nostall.parallel.simulate import (
    Timeline,
    costs,
    critical_path_s,
    load_bound_s,
    simulate,
    simulated_s,
)
from nostall.parallel.simulate.orders import in_flight_limits
from nostall.testing import check_space

ORDERS: tuple[Policy, ...] = ("gpipe", "pa", "pb", "1f1b", "list", "zero-bubble")
ROUNDING = 1e-9


@st.composite
def plans(draw: st.DrawFn, orders: tuple[Policy, ...] = ORDERS) -> tuple[Workload, Plan]:
    """A random workload and a random legal plan for it."""
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


@given(plans())
@settings(max_examples=150, deadline=None)
def test_simulated_time_is_above_the_lower_bounds(planned: tuple[Workload, Plan]) -> None:
    work, plan = planned
    seconds = simulated_s(work, plan)
    assert seconds >= critical_path_s(work, plan) * (1 - ROUNDING)
    assert seconds >= load_bound_s(work, plan) * (1 - ROUNDING)


@given(plans())
@settings(max_examples=100, deadline=None)
def test_timelines_are_legal(planned: tuple[Workload, Plan]) -> None:
    """Each operation runs once, after what it depends on; workers and links do one at a time."""
    work, plan = planned
    timeline = simulate(work, plan)
    _check_dependences(timeline)
    _check_resources(timeline)
    limits = in_flight_limits(plan, work.micro_batches)
    assert all(k <= limit for k, limit in zip(timeline.peak_in_flight, limits, strict=True))


def _check_dependences(timeline: Timeline) -> None:
    starts, costs = timeline.operation_starts, timeline.costs
    transfer_starts = timeline.transfer_starts
    kinds = (0, 1, 2) if timeline.splits_backward else (0, 1)
    assert (starts[list(kinds)] >= 0).all()
    ends = starts + timeline.durations[:, :, None]
    stages = starts.shape[1]
    backward_starts = transfer_starts[stages - 1 : 2 * (stages - 1)]
    for s in range(stages - 1):
        forward_s = costs.forward_transfers[s].seconds
        backward_s = costs.backward_transfers[s].seconds
        assert (transfer_starts[s] >= ends[0, s]).all()
        assert (starts[0, s + 1] >= transfer_starts[s] + forward_s - ROUNDING).all()
        assert (backward_starts[s] >= ends[1, s + 1]).all()
        assert (starts[1, s] >= backward_starts[s] + backward_s - ROUNDING).all()
    assert (starts[1] >= ends[0] - ROUNDING).all()
    if timeline.splits_backward:
        assert (starts[2] >= ends[1] - ROUNDING).all()
    last = ends[2 if timeline.splits_backward else 1, :, -1]
    assert (transfer_starts[2 * (stages - 1) :, 0] >= last - ROUNDING).all()


def _check_resources(timeline: Timeline) -> None:
    costs = timeline.costs
    busy: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for kind in range(3 if timeline.splits_backward else 2):
        for s, worker in enumerate(costs.worker):
            seconds = float(timeline.durations[kind, s])
            intervals = busy.setdefault(("worker", worker), [])
            intervals += [
                (float(t), float(t) + seconds) for t in timeline.operation_starts[kind, s]
            ]
    transfers = (*costs.forward_transfers, *costs.backward_transfers, *costs.allreduce)
    for transfer, starts in zip(transfers, timeline.transfer_starts, strict=True):
        for resource, seconds in transfer.loads:
            intervals = busy.setdefault(("link", resource), [])
            intervals += [(float(t), float(t) + seconds) for t in starts if t >= 0]
    for times in busy.values():
        times.sort()
        for (_, end), (start, _) in itertools.pairwise(times):
            assert start >= end - ROUNDING


@given(plans(("list",)))
@settings(max_examples=200, deadline=None)
def test_list_orders_keep_the_bound(planned: tuple[Workload, Plan]) -> None:
    """T <= (M + 4 S - 4) C plus the all-reduces, without limits on micro-batches in flight (SPP).

    C is the largest load per micro-batch of a stage or boundary.
    """
    work, plan = planned
    m, stages = work.micro_batches, len(plan.stages)
    plan = Plan(plan.stages, "list", (m,) * stages, plan.recompute)
    plan_costs = costs(work, plan)
    half = work.cluster.duplex == "half"
    loads = [f + b for f, b in zip(plan_costs.forward, plan_costs.backward, strict=True)]
    shared: dict[int, float] = {}
    for transfer in (*plan_costs.forward_transfers, *plan_costs.backward_transfers):
        loads.append(transfer.seconds * (2 if half else 1))
        for resource, seconds in transfer.loads:
            shared[resource] = shared.get(resource, 0.0) + seconds
    largest = max(*loads, *shared.values(), 0.0)
    reduces = sum(t.seconds for t in plan_costs.allreduce)
    assert simulated_s(work, plan) <= (m + 4 * stages - 4) * largest + reduces + ROUNDING


@given(st.integers(0, 10_000), st.sampled_from(LAYOUTS))
@settings(max_examples=8, deadline=None)
def test_nostall_is_never_worse_than_other_planners(seed: int, layout: str) -> None:
    rng = np.random.default_rng(seed)
    work = Workload(random_chain(6, rng), random_cluster(4, layout, rng), 6)
    effort = Effort(seconds=60, evaluations=60)
    nostall_s = simulated_s(work, make_plan(work, "nostall", effort))
    for name in PLANNERS:
        if name != "exhaustive":
            other_s = simulated_s(work, make_plan(work, name, effort))
            assert nostall_s <= other_s * (1 + ROUNDING), name


@pytest.mark.parametrize("policy", ["pb", "zero-bubble"])
def test_plan_space_is_a_legal_space(policy: Policy) -> None:
    rng = np.random.default_rng(3)
    work = Workload(random_chain(5, rng), random_cluster(3, "two servers", rng), 4)
    first = Plan((Stage(0, 2, (0,)), Stage(2, 5, (1, 2))), policy)
    check_space(PlanSpace(work, first))
