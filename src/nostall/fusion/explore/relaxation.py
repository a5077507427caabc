"""The integer programme without its integers: a bound, and which columns can matter at all.

Hundreds of thousands of columns over a few dozen operators: the programme is solved over few of
them, and whichever would still pay at its prices join, until none does (column generation).  At
those prices a column costs more than it gains by its *reduced loss*; a plan that contains it is at
least that far below the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from nostall.fusion.graph.partition import Mask

_AT_ONCE = 200
"""Columns that join in one round."""
_LEAST = 1e-7
"""Of the largest gain: what counts as none."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """``bound``: no plan gains more.  ``losses``: of every column at least how much less than the
    bound a plan with it gains.  ``support``: columns that the solution takes a part of."""

    bound: float
    losses: NDArray[np.float64]
    support: tuple[int, ...]


def incidence(patterns: Sequence[Mask], operators: Sequence[int]) -> NDArray[np.uint8]:
    """Patterns by operators: 1 where the pattern holds the operator."""
    width = operators[-1] // 8 + 1 if operators else 1
    raw = b"".join(mask.to_bytes(width, "little") for mask in patterns)
    bits = np.frombuffer(raw, np.uint8).reshape(len(patterns), width)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, list(operators)]


def relaxed(held: NDArray[np.uint8], gains: NDArray[np.float64]) -> Relaxation | None:
    """The linear programme over all columns (rows of ``held``); None where the solver fails."""
    least = _LEAST * float(gains.max())
    sizes = held.sum(axis=1)
    chosen = np.argsort(-gains / sizes, kind="stable")[:_AT_ONCE]
    while True:
        matrix = held[chosen].T.astype(np.float64)
        result = linprog(-gains[chosen], A_ub=matrix, b_ub=np.ones(len(matrix)), method="highs")
        if result.status != 0:
            return None
        prices = np.maximum(0.0, -result.ineqlin.marginals)
        losses = held @ prices - gains
        # One that takes part already pays by the solver's tolerance alone.
        paying = np.setdiff1d(np.flatnonzero(losses < -least), chosen)
        if not len(paying):
            break
        worst = paying[np.argsort(losses[paying], kind="stable")[:_AT_ONCE]]
        chosen = np.concatenate([chosen, worst])
    # What is left below zero is rounding; a plan has at most one column for each operator.
    bound = float(prices.sum()) + held.shape[1] * max(0.0, -float(losses.min()))
    support = tuple(int(at) for at in chosen[result.x > _LEAST])
    return Relaxation(bound, np.maximum(losses, 0.0), support)
