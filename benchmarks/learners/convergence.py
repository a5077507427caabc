"""Convergence of Markov chains (split R-hat, effective sample size), and novelty in their draws.

Source: Vehtari et al., "Rank-normalization, folding, and localization", Bayesian Analysis 2021
(the formulas without rank normalization), and Geyer's initial monotone sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nostall.workload.learning.diagnostics import Floats
from nostall.workload.learning.topics.classifier import OpenTopics


@dataclass(frozen=True, slots=True)
class Convergence:
    """Diagnostics of one monitored scalar."""

    mean: float
    r_hat: float
    """1 for chains that agree; NaN for fewer than 4 draws."""
    effective_draws: float


def convergence(chains: Floats) -> Convergence:
    """Diagnostics of ``chains``, shape (chains, draws)."""
    draws = chains.shape[1] // 2
    mean = float(chains.mean()) if chains.size else float("nan")
    if draws < 2:
        return Convergence(mean, float("nan"), float(chains.size))
    halves = np.concatenate([chains[:, :draws], chains[:, -draws:]])
    within = float(halves.var(axis=1, ddof=1).mean())
    between = float(draws * halves.mean(axis=1).var(ddof=1))
    if within <= 0:
        return Convergence(mean, 1.0 if between <= 0 else float("inf"), float(chains.size))
    pooled = (draws - 1) / draws * within + between / draws
    return Convergence(mean, float(np.sqrt(pooled / within)), _effective_draws(halves, pooled))


def _effective_draws(chains: Floats, pooled: float) -> float:
    """Draws divided by the autocorrelation time, which sums positive pairs of lags."""
    count, draws = chains.shape
    centred = chains - chains.mean(axis=1, keepdims=True)
    size = 1 << (2 * draws - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(centred, size, axis=1)) ** 2
    covariance = np.fft.irfft(spectrum, size, axis=1)[:, :draws] / draws
    within = float((covariance[:, 0] * draws / (draws - 1)).mean())
    correlation = 1.0 - (within - covariance.mean(axis=0)) / pooled
    time, smallest = -1.0, float("inf")
    for lag in range(0, draws - 1, 2):
        pair = float(correlation[lag] + correlation[lag + 1])
        if pair < 0:
            break
        smallest = min(smallest, pair)
        time += 2 * smallest
    return float(min(count * draws / max(time, 1e-12), count * draws * np.log10(count * draws)))


def convergence_of(traces: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Convergence]:
    """Diagnostics of the scalars that each chain monitored after each sweep."""
    length = min(len(trace) for trace in traces)
    return {
        name: convergence(np.array([[row[name] for row in t[:length]] for t in traces]))
        for name in traces[0][0]
    }


def training_novelty(model: OpenTopics) -> Floats:
    """Share of the draws in which each training document is of a new category."""
    share: Floats = (model.category_draws_ >= len(model.classes_)).mean(axis=0)
    return share
