"""Race of several candidates against the original, with few measurements and a sequential test.

Each measurement is a ratio original / candidate from a module load of its own; ratios are never
multiplied with each other. The test is a sign test that may be evaluated after each measurement:
its e-value for k wins in n measurements is the average likelihood ratio of a win probability p
above 1/2 against 1/2, over all such p. If each measurement is a win with a probability of at most
1/2, given all earlier ones, the e-value ever exceeds 1/a with a probability of at most a (Ville,
1939; Robbins, "Statistical methods related to the law of the iterated logarithm", 1970; Howard,
Ramdas, McAuliffe and Sekhon, arXiv:1810.08240). So the test assumes nothing about the distribution
or the drift of times. Losers leave early, as in the races of Maron and Moore (NIPS 1993).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

ROUNDS = 40
"""Most measurements per candidate."""
LEVEL = 0.05
"""Probability that any candidate that is no faster than the original wins."""


@cache
def e_value(wins: int, losses: int) -> float:
    """Evidence of ``wins`` and ``losses`` against a win probability of at most 1/2.

    ``2 * integral over p in (1/2, 1) of (2 p)**wins * (2 (1 - p))**losses``, computed in integers.
    """
    n = wins + losses
    below = sum(math.comb(n + 1, i) for i in range(wins + 1))
    return below / ((n + 1) * math.comb(n, wins))


@dataclass(frozen=True)
class RaceResult:
    """Outcome of a race; candidates are numbers from 0."""

    remaining: tuple[int, ...]
    """Candidates that did not leave, the best median ratio first."""
    winners: frozenset[int]
    """Remaining candidates that are faster than the original at ``LEVEL``."""
    measurements: int
    """Number of measurements."""


def race(
    measure: Callable[[int], float], count: int, rounds: int = ROUNDS, level: float = LEVEL
) -> RaceResult:
    """Race the candidates 0 to ``count`` - 1.

    ``measure(i)`` measures the ratio original / candidate i; NaN if the candidate fails. A
    candidate leaves if it fails, if it is shown to be slower than the original, or slower than
    another candidate by their ratios of the same rounds. The race ends when the only remaining
    candidate has won, when none remains, or after ``rounds``.
    """
    ratios: list[list[float]] = [[] for _ in range(count)]
    remaining = list(range(count))
    threshold = count / level
    while remaining and len(ratios[remaining[0]]) < rounds:
        for number in remaining:
            ratios[number].append(measure(number))
        remaining = [n for n in remaining if math.isfinite(ratios[n][-1])]
        remaining = [n for n in remaining if _faster([1.0] * len(ratios[n]), ratios[n]) < threshold]
        pair_threshold = threshold * count
        remaining = [
            n
            for n in remaining
            if all(_faster(ratios[m], ratios[n]) < pair_threshold for m in remaining)
        ]
        if len(remaining) == 1 and _wins(ratios[remaining[0]]) >= threshold:
            break
    ranked = sorted(remaining, key=lambda number: (-float(np.median(ratios[number])), number))
    winners = frozenset(number for number in remaining if _wins(ratios[number]) >= threshold)
    return RaceResult(tuple(ranked), winners, sum(map(len, ratios)))


def _wins(ratios: list[float]) -> float:
    """E-value for a candidate being faster than the original."""
    return _faster(ratios, [1.0] * len(ratios))


def _faster(a: list[float], b: list[float]) -> float:
    """E-value for ``a`` being above ``b``, pair by pair; equal pairs do not count."""
    wins = sum(x > y for x, y in zip(a, b, strict=True))
    losses = sum(x < y for x, y in zip(a, b, strict=True))
    return e_value(wins, losses)
