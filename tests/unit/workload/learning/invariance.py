"""Test of one step of a Markov chain: it must not change a distribution that it starts from.

All unknowns and data are drawn from the joint distribution of the model, the step is applied, and
statistics after it are compared with those before it.  The pairs are independent, so their
differences have a standard error without autocorrelation (Gandy and Scott, "Unit testing for MCMC",
2020).  The test finds errors that later steps of a sweep would hide from Geweke's test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Statistics = Mapping[str, float]
LIMIT = 4.0
"""Largest |z| of a correct step."""


def largest_z(pair: Callable[[np.random.Generator], tuple[Statistics, Statistics]],
              draws: int, seed: int = 0) -> tuple[float, str]:  # fmt: skip
    """The largest |z| of the paired differences of all statistics, and the statistic's name.

    ``pair`` draws a state and returns the statistics before and after the step.
    """
    rng = np.random.default_rng(seed)
    pairs = [pair(rng) for _ in range(draws)]
    scores = {}
    for name in pairs[0][0]:
        difference = np.array([after[name] - before[name] for before, after in pairs])
        if np.isnan(difference).any():
            return float("inf"), f"{name} is not a number"
        deviation = difference.std(ddof=1)
        scores[name] = (
            abs(difference.mean()) / (deviation / np.sqrt(draws)) if deviation > 0 else 0.0
        )
    name = max(scores, key=lambda key: scores[key])
    return float(scores[name]), name
