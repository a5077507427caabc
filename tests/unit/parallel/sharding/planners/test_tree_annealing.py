"""Annealing by trees: reaches the optimum of small problems, and serves when the program fails."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from nostall.parallel.sharding.planners import sharding
from nostall.parallel.sharding.planners.integer_program import OutOfTime, Problem, solve
from nostall.parallel.sharding.planners.sharding import Options, plan_sharding
from nostall.parallel.sharding.planners.tied import tie
from nostall.parallel.sharding.planners.tree_annealing import anneal, make_tables
from tests.unit.parallel.sharding.planners.test_sharding import _prices


def _problem(exposed: float = 1.0) -> Problem:
    prices = _prices()
    others = ((0,) * len(prices.graph.operators),)
    return Problem(prices, tie(prices.graph), 0, others, exposed=exposed)


def test_tables_hold_the_seconds_of_all_states() -> None:
    problem = _problem(exposed=0.5)
    tables = make_tables(problem)
    states = itertools.product(*map(range, tables.strategies))
    best = min(tables.seconds(np.array(state)) for state in states)
    assert best == pytest.approx(solve(problem, 10.0).objective_s, rel=1e-4)


@pytest.mark.slow  # compiles the moves
@pytest.mark.parametrize("seed", range(3))
def test_annealing_reaches_the_optimum(seed: int) -> None:
    problem = _problem()
    optimum = solve(problem, 10.0).objective_s
    found = anneal(problem, 20.0, seed, stop_s=optimum * (1 + 1e-4))
    assert found.objective_s == pytest.approx(optimum, rel=1e-3)
    assert not found.is_integral and found.bound_s == 0  # no proof
    assert anneal(problem, 0.0, seed).numbers == anneal(problem, 0.0, seed).numbers


@pytest.mark.slow
def test_annealing_serves_if_the_program_is_not_solved_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = plan_sharding(_prices(), Options())

    def fail(problem: Problem, seconds: float) -> None:
        raise OutOfTime("no solution")

    monkeypatch.setattr(sharding, "solve", fail)
    found, _ = plan_sharding(_prices(), Options(seconds=2.0))
    assert found.step_s <= expected.step_s * 1.01 and not found.is_proven
