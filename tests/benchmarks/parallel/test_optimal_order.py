"""The optimum with free order (CP-SAT) against times worked out by hand, and the simulator."""

from __future__ import annotations

import pytest

from tests.unit.parallel.cases import pipeline, straight

pytest.importorskip("ortools", reason="the free order needs OR-tools (extra nostall[dev])")

from benchmarks.parallel.instances import small_problem
from benchmarks.parallel.optimal_order import free_optimum, scheduled

from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import costs, simulated_s


def test_a_balanced_pipeline_has_the_textbook_bubble() -> None:
    work = pipeline(3, 4, forward=1e-3, backward=2e-3)
    found, proven = scheduled(costs(work, straight([1, 2, 3], "list")), 4, 1.0)
    assert proven and found == pytest.approx((4 + 2) * 3e-3)
    half = pipeline(3, 4, forward=1e-3, backward=2e-3, parameters=1e-9)
    found, proven = scheduled(costs(half, straight([1, 2, 3], "zero-bubble")), 4, 1.0)
    # F, I and W of one millisecond: only two forwards to get in and the last stage's to wait for.
    assert proven and found == pytest.approx(4 * 3e-3 + 2e-3)


@pytest.mark.parametrize("seed", [1, 24, 34])
def test_no_planner_beats_it(seed: int) -> None:
    work, _ = small_problem(seed)
    best = simulated_s(work, make_plan(work, "exhaustive", Effort(60)))
    own = simulated_s(work, make_plan(work, "nostall", Effort(60, 200)))
    found = free_optimum(work, min(best, own) * 1.1)
    assert found.proven
    # Rounding to microseconds may cost a few of them.
    assert found.seconds <= min(best, own) + 1e-4
