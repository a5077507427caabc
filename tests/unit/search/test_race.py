"""The race: who wins, who leaves, and how seldom chance wins."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from nostall.search.race import LEVEL, ROUNDS, evidence, race


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (7, 0), (5, 3), (3, 9), (40, 22)])
def test_evidence_is_the_integral(wins: int, losses: int) -> None:
    p = np.linspace(0.5, 1.0, 200_001)
    density = (2 * p) ** wins * (2 * (1 - p)) ** losses
    integral = 2 * float(np.sum((density[1:] + density[:-1]) / 2)) * (p[1] - p[0])
    assert evidence(wins, losses) == pytest.approx(integral, rel=1e-4)


@pytest.mark.parametrize("wins", range(0, 30, 5))
@pytest.mark.parametrize("losses", range(0, 30, 5))
def test_evidence_grows_by_no_more_than_chance_allows(wins: int, losses: int) -> None:
    """A fair coin makes none on average: the mean of what follows is at most what is."""
    following = (evidence(wins + 1, losses) + evidence(wins, losses + 1)) / 2
    assert following <= evidence(wins, losses) * (1 + 1e-12)


def _null(rng: np.random.Generator, drift: float) -> Callable[[int], float]:
    """Ratios around 1 whose size drifts and which come with outliers."""
    calls = iter(range(10**9))

    def measure(number: int) -> float:
        wide = 1e-3 * (1 + drift * math.sin(next(calls) / 40))
        return 1.0 + wide * float(rng.standard_t(2))

    return measure


@pytest.mark.parametrize(("count", "drift"), [(1, 0.0), (3, 0.9), (6, 0.0)])
def test_false_wins_are_no_more_than_stated(count: int, drift: float) -> None:
    """Looked at after every round; races of candidates that are exactly as fast."""
    rng = np.random.default_rng(count)
    races = 300 // count
    false = sum(bool(race(_null(rng, drift), count).won) for _ in range(races))
    assert false <= LEVEL * races + 2 * math.sqrt(LEVEL * (1 - LEVEL) * races)


def test_false_wins_are_close_to_a_coarse_level() -> None:
    """The bound says something: at a level of one half, chance does win now and then."""
    rng = np.random.default_rng(7)
    false = sum(bool(race(_null(rng, 0.0), 1, 200, level=0.5).won) for _ in range(100))
    assert 5 <= false <= 50


def test_the_fastest_wins_and_losers_leave_early() -> None:
    rng = np.random.default_rng(0)
    speed = [0.98, 1.0, 1.01, 0.99, 1.03, 1.0]
    asked: list[int] = []

    def measure(number: int) -> float:
        asked.append(number)
        return speed[number] + 0.002 * float(rng.normal())

    found = race(measure, len(speed))
    assert found.left == (4,)
    assert found.won == {4}
    assert found.measured == len(asked) < len(speed) * 20
    assert asked.count(0) < 12


def test_equals_stay_and_nobody_is_said_to_have_won() -> None:
    found = race(lambda number: 1.0, 3)
    assert found.left == (0, 1, 2) and not found.won
    assert found.measured == 3 * ROUNDS


def test_a_candidate_that_fails_is_out_and_all_may_be() -> None:
    answers = {0: [1.1, math.nan], 1: [1.05] * ROUNDS}
    found = race(lambda number: answers[number].pop(0), 2)
    assert found.left == (1,) and found.won == {1}
    assert race(lambda number: math.nan, 2).left == ()
    assert race(lambda number: 0.9, 2).left == ()
    assert race(lambda number: 1.0, 0).left == ()
