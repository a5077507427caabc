"""Plans of planners that a time limit ends: never slower than the plans that need no search."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from nostall.core.compile_clock import compiled_s, planning_clock
from nostall.parallel.errors import Infeasible
from nostall.parallel.evaluation import evaluate_plan, evaluation_document
from nostall.parallel.plan import Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.planners.fastest import simulated_cheap_plans
from nostall.parallel.simulate import simulated_s
from nostall.report.plan.summary import sentences
from tests.unit.parallel.cases import profile, servers, straight

SEARCHES = ("nostall", "dapple", "spp")
"""Planners that return their best plan so far at the time limit."""
GIB = 2.0**30


def slow_network(layers: int = 8, gpus: int = 4) -> Workload:
    """Four servers of one GPU whose links take longer than the layers: one GPU is the fastest."""
    cluster = servers(gpus, 1, between=0.01, memory=64)
    return Workload(profile(layers, boundary=1e9, parameters=1e9), cluster, 8)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SEARCHES),
    st.sampled_from([0.0, 1e-4, 0.01, 0.1, 2.0]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 9),
    st.sampled_from([0.01, 0.1, 1.0, 10.0, 100.0]),
    st.sampled_from([1e6, 1e8, 1e10]),
    st.sampled_from([0.5, 4.0, 1000.0]),
    st.booleans(),
)
def test_no_limit_gives_a_plan_that_is_slower_than_a_cheap_one(
    planner: str,
    seconds: float,
    count: int,
    gpus: int,
    layers: int,
    between: float,
    size: float,
    memory: float,
    recompute: bool,
) -> None:
    cluster = servers(count, gpus, between=between, memory=memory)
    work = Workload(profile(layers, boundary=size, parameters=size, stored=size), cluster, 16)
    cheap = simulated_cheap_plans(work, recompute)
    effort = Effort(seconds, evaluations=60, recompute=recompute)
    if not cheap:
        return  # an error names the limit: test_planners.py
    plan = make_plan(work, planner, effort)
    found_s = simulated_s(work, plan)
    for name, (_, cheap_s) in cheap.items():
        assert found_s <= cheap_s, name


@pytest.mark.parametrize("planner", [*SEARCHES, "pipedream"])
def test_a_limit_of_nothing_gives_the_fastest_cheap_plan_on_many_gpus(planner: str) -> None:
    work = Workload(profile(6), servers(20, 8, inside=100, between=10), 100)
    best_s = min(seconds for _, seconds in simulated_cheap_plans(work, True).values())
    assert simulated_s(work, make_plan(work, planner, Effort(seconds=0.0))) <= best_s


def test_one_gpu_is_planned_where_links_are_slow() -> None:
    work = slow_network()
    for planner in SEARCHES:
        for seconds in (0.0, 60.0):
            plan = make_plan(work, planner, Effort(seconds, evaluations=60))
            assert evaluate_plan(work, plan, planner).speedup == pytest.approx(1)


def test_a_plan_that_does_not_fit_is_no_cheap_plan() -> None:
    work = Workload(profile(2, stored=30 * GIB), servers(1, 2, memory=4), 8)
    assert simulated_cheap_plans(work, False) == {}
    for planner in SEARCHES:
        with pytest.raises(Infeasible):
            make_plan(work, planner, Effort(0.0))


def test_a_plan_that_is_slower_than_one_gpu_says_so() -> None:
    work = slow_network()
    slow = evaluate_plan(work, straight([2, 4, 6, 8], "1f1b"), "even")
    document = evaluation_document(slow)
    assert document["predicted_speedup"] < 1 and document["predicted_speedup_over_cheap"] < 1
    assert set(document["cheap_plans_s"]) == {
        "one GPU", "data parallelism", "data parallelism in one server", "a balanced pipeline",
    }  # fmt: skip
    assert next(iter(document["cheap_plans_s"])) in ("one GPU", "data parallelism in one server")
    for text in ("\n".join(document["notes"]), "\n".join(sentences(slow))):
        assert "this plan is SLOWER than one GPU: 0." in text
        assert "which needs no search: 0." in text
    fast = Workload(profile(8), servers(1, 4, inside=100), 64)
    good = evaluate_plan(fast, make_plan(fast, "nostall", Effort(20, 60)), "nostall")
    assert good.speedup > 1 and good.speedup_over_cheap is not None
    assert good.speedup_over_cheap >= 1
    assert "SLOWER" not in "\n".join(sentences(good))


def test_compilation_does_not_count() -> None:
    effort = Effort(seconds=0.2)
    before, began, planning = compiled_s(), time.monotonic(), planning_clock()

    @njit  # type: ignore[untyped-decorator]
    def compiled(values: np.ndarray) -> float:  # type: ignore[type-arg]
        total = 0.0
        for value in values:
            total += np.sqrt(value) ** 1.5
        return total

    assert compiled(np.ones(3)) == 3.0
    took = compiled_s() - before
    assert took > 0.02  # typing, LLVM and machine code
    assert planning_clock() - planning == pytest.approx(time.monotonic() - began - took, abs=0.02)
    assert effort.elapsed_s < time.monotonic() - began - 0.9 * took + 0.05
