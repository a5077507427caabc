"""Which of several candidates beats the original, in as few measurements as that takes.

Each measurement is a ratio original / candidate from a load of its own; ratios are never chained.
Evidence is a *sign test that may be looked at any time*: with k wins in n measurements it is the
average, over all chances p above one half, of how much better p explains the wins than one half.
Where the chance to win is at most one half each time, whatever happened before, it exceeds 1/a with
probability at most a, ever (Ville, 1939; Robbins, "Statistical methods related to the law of the
iterated logarithm", 1970; Howard, Ramdas, McAuliffe and Sekhon, arXiv:1810.08240).  So nothing is
assumed of how times are distributed or drift.  Losers leave early, as in the races of Maron and
Moore (NIPS 1993).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

ROUNDS = 40
"""Measurements per candidate, at most."""
LEVEL = 0.05
"""The chance that any candidate which is no faster than the original is said to have won."""


@cache
def evidence(wins: int, losses: int) -> float:
    """How strongly ``wins`` and ``losses`` speak against a chance to win of at most one half.

    ``2 * integral over p in (1/2, 1) of (2 p)**wins * (2 (1 - p))**losses``, in whole numbers.
    """
    n = wins + losses
    below = sum(math.comb(n + 1, i) for i in range(wins + 1))
    return below / ((n + 1) * math.comb(n, wins))


@dataclass(frozen=True)
class Raced:
    """``left``: the candidates that were not dropped, best median ratio first; ``won``: those that
    beat the original beyond ``LEVEL``; ``measured``: how many measurements it took."""

    left: tuple[int, ...]
    won: frozenset[int]
    measured: int


def race(
    measure: Callable[[int], float], count: int, rounds: int = ROUNDS, level: float = LEVEL
) -> Raced:
    """Race candidates 0 to ``count`` - 1; ``measure(i)`` gives original / candidate, NaN when the
    candidate fails.

    A candidate leaves when it fails, when it is shown to be slower than the original, or slower
    than another one by their ratios of the same rounds.  It ends when one that has won is left,
    none is, or after ``rounds``.
    """
    ratios: list[list[float]] = [[] for _ in range(count)]
    left = list(range(count))
    enough = count / level
    while left and len(ratios[left[0]]) < rounds:
        for number in left:
            ratios[number].append(measure(number))
        left = [number for number in left if math.isfinite(ratios[number][-1])]
        left = [n for n in left if _beats([1.0] * len(ratios[n]), ratios[n]) < enough]
        pairs = enough * count
        left = [n for n in left if all(_beats(ratios[m], ratios[n]) < pairs for m in left)]
        if len(left) == 1 and _wins(ratios[left[0]]) >= enough:
            break
    ranked = sorted(left, key=lambda number: (-float(np.median(ratios[number])), number))
    won = frozenset(number for number in left if _wins(ratios[number]) >= enough)
    return Raced(tuple(ranked), won, sum(map(len, ratios)))


def _wins(ratios: list[float]) -> float:
    return _beats(ratios, [1.0] * len(ratios))


def _beats(a: list[float], b: list[float]) -> float:
    """Evidence that ``a`` is above ``b``, pair by pair; equal ones say nothing."""
    wins = sum(x > y for x, y in zip(a, b, strict=True))
    losses = sum(x < y for x, y in zip(a, b, strict=True))
    return evidence(wins, losses)
