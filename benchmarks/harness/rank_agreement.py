"""Agreement of modelled and measured times of one kernel's candidates: rank and error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pairs = Sequence[tuple[float, float]]
"""(modelled, measured) time of each candidate, in one unit."""


def agreement(pairs: Pairs) -> tuple[float | None, float]:
    """(Kendall's tau-b, median of abs(modelled / measured - 1))."""
    modelled, measured = np.array(pairs, dtype=np.float64).T
    return kendall(modelled, measured), float(np.median(np.abs(modelled / measured - 1.0)))


def kendall(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Kendall's tau-b (Kendall 1945): 1 for the same order, 0 for unrelated orders.

    The denominator leaves out ties. None if all values of ``x`` or of ``y`` are equal. Needs memory
    quadratic in the number of values.
    """
    upper = np.triu_indices(len(x), 1)
    a, b = (np.sign(v[:, None] - v[None, :])[upper] for v in (x, y))
    untied = float(np.sqrt(np.abs(a).sum() * np.abs(b).sum()))
    return float((a * b).sum() / untied) if untied else None
