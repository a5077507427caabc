"""The optimum with free order (CP-SAT), compared with times by hand and with the simulator."""

from __future__ import annotations

import pytest

from tests.unit.parallel.cases import pipeline, straight

pytest.importorskip("ortools", reason="the free order needs OR-tools (extra nostall[dev])")

from benchmarks.parallel.instances import small_problem
from benchmarks.parallel.optimal_order import best_order, free_optimum

from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import costs, simulated_s


def test_balanced_pipeline_has_the_textbook_bubble() -> None:
    work = pipeline(3, 4, forward=1e-3, backward=2e-3)
    seconds, proven = best_order(costs(work, straight([1, 2, 3], "list")), 4, 1.0)
    assert proven and seconds == pytest.approx((4 + 2) * 3e-3)
    split = pipeline(3, 4, forward=1e-3, backward=2e-3, parameters=1e-9)
    seconds, proven = best_order(costs(split, straight([1, 2, 3], "zero-bubble")), 4, 1.0)
    # F, I and W take one millisecond: the bubble is two forward passes until the last stage starts.
    assert proven and seconds == pytest.approx(4 * 3e-3 + 2e-3)


@pytest.mark.parametrize(
    "seed", [*(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 24)), 34]
)
def test_no_planner_is_faster_than_the_optimum(seed: int) -> None:
    work, _ = small_problem(seed)
    best = simulated_s(work, make_plan(work, "exhaustive", Effort(60)))
    own = simulated_s(work, make_plan(work, "nostall", Effort(60, 200)))
    optimum = free_optimum(work, min(best, own) * 1.1)
    assert optimum.proven
    # Times are rounded to microseconds, so the sum may differ by some of them.
    assert optimum.seconds <= min(best, own) + 1e-4
