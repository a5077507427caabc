"""Race of candidates: winners, candidates that leave early, and the rate of false wins."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from nostall.search.race import LEVEL, ROUNDS, e_value, race


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (7, 0), (5, 3), (3, 9), (40, 22)])
def test_the_e_value_is_the_integral(wins: int, losses: int) -> None:
    p = np.linspace(0.5, 1.0, 200_001)
    density = (2 * p) ** wins * (2 * (1 - p)) ** losses
    integral = 2 * float(np.sum((density[1:] + density[:-1]) / 2)) * (p[1] - p[0])
    assert e_value(wins, losses) == pytest.approx(integral, rel=1e-4)


@pytest.mark.parametrize("wins", range(0, 30, 5))
@pytest.mark.parametrize("losses", range(0, 30, 5))
def test_the_e_value_is_a_supermartingale(wins: int, losses: int) -> None:
    """With a win probability of 1/2, the mean of the next e-value is at most the current one."""
    following = (e_value(wins + 1, losses) + e_value(wins, losses + 1)) / 2
    assert following <= e_value(wins, losses) * (1 + 1e-12)


def _null(rng: np.random.Generator, drift: float) -> Callable[[int], float]:
    """Ratios around 1 with outliers, whose spread drifts."""
    calls = iter(range(10**9))

    def measure(number: int) -> float:
        spread = 1e-3 * (1 + drift * math.sin(next(calls) / 40))
        return 1.0 + spread * float(rng.standard_t(2))

    return measure


@pytest.mark.parametrize(("count", "drift"), [(1, 0.0), (3, 0.9), (6, 0.0)])
def test_false_wins_keep_to_the_level(count: int, drift: float) -> None:
    """Races of candidates that are as fast as the original, tested after each round."""
    rng = np.random.default_rng(count)
    races = 300 // count
    false = sum(bool(race(_null(rng, drift), count).winners) for _ in range(races))
    assert false <= LEVEL * races + 2 * math.sqrt(LEVEL * (1 - LEVEL) * races)


def test_false_wins_are_close_to_a_coarse_level() -> None:
    """The bound is not vacuous: at a level of 1/2 there are false wins."""
    rng = np.random.default_rng(7)
    false = sum(bool(race(_null(rng, 0.0), 1, 200, level=0.5).winners) for _ in range(100))
    assert 5 <= false <= 50


def test_the_fastest_wins_and_losers_leave_early() -> None:
    rng = np.random.default_rng(0)
    speeds = [0.98, 1.0, 1.01, 0.99, 1.03, 1.0]
    measured: list[int] = []

    def measure(number: int) -> float:
        measured.append(number)
        return speeds[number] + 0.002 * float(rng.normal())

    result = race(measure, len(speeds))
    assert result.remaining == (4,)
    assert result.winners == {4}
    assert result.measurements == len(measured) < len(speeds) * 20
    assert measured.count(0) < 12


def test_equal_candidates_remain_and_none_wins() -> None:
    result = race(lambda number: 1.0, 3)
    assert result.remaining == (0, 1, 2) and not result.winners
    assert result.measurements == 3 * ROUNDS


def test_failing_and_slower_candidates_leave_even_all_of_them() -> None:
    ratios = {0: [1.1, math.nan], 1: [1.05] * ROUNDS}
    result = race(lambda number: ratios[number].pop(0), 2)
    assert result.remaining == (1,) and result.winners == {1}
    assert race(lambda number: math.nan, 2).remaining == ()
    assert race(lambda number: 0.9, 2).remaining == ()
    assert race(lambda number: 1.0, 0).remaining == ()
