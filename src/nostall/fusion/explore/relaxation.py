"""Linear relaxation of the integer program: an upper bound and the reduced cost of each column.

The program has hundreds of thousands of columns and a few dozen rows (operators), so it is solved
by column generation: over a few columns first, then with those that have a positive gain at the
current dual prices, until no column has one. At the final prices, a column's *loss* is how much its
price exceeds its gain (its negated reduced cost). A partition that contains the column gains at
least that much less than the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from nostall.fusion.graph.partition import Mask

_COLUMNS_PER_ROUND = 200
_TOLERANCE = 1e-7
"""Values below this share of the largest gain count as 0."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Solution of the linear program."""

    bound: float
    """Upper bound on the gain of any partition."""
    losses: NDArray[np.float64]
    """For each column: how much less than the bound a partition with it gains, at least."""
    support: tuple[int, ...]
    """Columns with a positive share in the solution."""


def incidence(patterns: Sequence[Mask], operators: Sequence[int]) -> NDArray[np.uint8]:
    """Matrix of patterns by operators: 1 if the pattern contains the operator."""
    width = operators[-1] // 8 + 1 if operators else 1
    raw = b"".join(mask.to_bytes(width, "little") for mask in patterns)
    bits = np.frombuffer(raw, np.uint8).reshape(len(patterns), width)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, list(operators)]


def solve_relaxation(contains: NDArray[np.uint8], gains: NDArray[np.float64]) -> Relaxation | None:
    """Solve the linear program over all columns; None if the solver fails.

    ``contains`` is the matrix of :func:`incidence`; each of its rows is a column of the program.
    """
    tolerance = _TOLERANCE * float(gains.max())
    sizes = contains.sum(axis=1)
    active = np.argsort(-gains / sizes, kind="stable")[:_COLUMNS_PER_ROUND]
    while True:
        matrix = contains[active].T.astype(np.float64)
        result = linprog(-gains[active], A_ub=matrix, b_ub=np.ones(len(matrix)), method="highs")
        if result.status != 0:
            return None
        prices = np.maximum(0.0, -result.ineqlin.marginals)
        losses = contains @ prices - gains
        # Active columns can have a negative loss only within the solver's tolerance.
        profitable = np.setdiff1d(np.flatnonzero(losses < -tolerance), active)
        if not len(profitable):
            break
        entering = profitable[np.argsort(losses[profitable], kind="stable")[:_COLUMNS_PER_ROUND]]
        active = np.concatenate([active, entering])
    # Losses below 0 are rounding errors. A partition has at most one column for each operator.
    bound = float(prices.sum()) + contains.shape[1] * max(0.0, -float(losses.min()))
    support = tuple(int(at) for at in active[result.x > _TOLERANCE])
    return Relaxation(bound, np.maximum(losses, 0.0), support)
