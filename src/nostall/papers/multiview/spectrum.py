"""Dirichlet-process mixture over frequencies: Chinese-restaurant steps with conjugate components.

Each component is a normal distribution with a normal-inverse-Wishart prior.  Assignments integrate
the component's parameters out (Neal's algorithm 3); the parameters are then drawn for the
frequencies' HMC step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.papers.multiview.priors import BaseMeasure, Floats

Ints = NDArray[np.int64]


class Components(NamedTuple):
    """Parameters of the components in use."""

    means: Floats
    """(components, m)."""
    precisions: Floats
    """(components, m, m)."""


def draw_assignments(
    rng: np.random.Generator,
    frequencies: Floats,
    assignments: Ints,
    alpha: float,
    base: BaseMeasure,
) -> Ints:
    """One sweep over the component of each frequency; components are renumbered from 0."""
    drawn = _sweep(
        frequencies,
        assignments.copy(),
        rng.random(len(frequencies)),
        alpha,
        base.mean,
        base.kappa,
        base.degrees,
        base.scale,
    )
    _, renumbered = np.unique(drawn, return_inverse=True)
    return np.asarray(renumbered, dtype=np.int64)


@njit(cache=True)  # type: ignore[untyped-decorator]
def log_predictive(
    w: Floats,
    count: int,
    total: Floats,
    products: Floats,
    mean0: Floats,
    kappa0: float,
    degrees0: float,
    scale0: Floats,
) -> float:
    """Log density of ``w`` given ``count`` members with sum ``total`` and sum of ww' ``products``.

    A Student distribution with degrees0 + count - m + 1 degrees of freedom.
    """
    m = w.shape[0]
    kappa = kappa0 + count
    degrees = degrees0 + count
    mean = (kappa0 * mean0 + total) / kappa
    scale = scale0 + products + kappa0 * np.outer(mean0, mean0) - kappa * np.outer(mean, mean)
    freedom = degrees - m + 1.0
    factor = np.linalg.cholesky(scale * (kappa + 1.0) / (kappa * freedom))
    residual = np.linalg.solve(factor, w - mean)
    distance = (residual * residual).sum()
    log_determinant = np.log(np.diag(factor)).sum()
    return float(
        math.lgamma((freedom + m) / 2.0)
        - math.lgamma(freedom / 2.0)
        - 0.5 * m * math.log(freedom * math.pi)
        - log_determinant
        - 0.5 * (freedom + m) * math.log1p(distance / freedom)
    )


@njit(cache=True)  # type: ignore[untyped-decorator]
def _sweep(
    frequencies: Floats,
    assignments: Ints,
    uniforms: Floats,
    alpha: float,
    mean0: Floats,
    kappa0: float,
    degrees0: float,
    scale0: Floats,
) -> Ints:
    count, m = frequencies.shape
    slots = count + 1
    sizes = np.zeros(slots, np.int64)
    totals = np.zeros((slots, m))
    products = np.zeros((slots, m, m))
    for j in range(count):
        c = assignments[j]
        sizes[c] += 1
        totals[c] += frequencies[j]
        products[c] += np.outer(frequencies[j], frequencies[j])
    weights = np.empty(slots)
    for j in range(count):
        w, c = frequencies[j], assignments[j]
        sizes[c] -= 1
        totals[c] -= w
        products[c] -= np.outer(w, w)
        fresh = -1
        best = -np.inf
        for k in range(slots):
            weights[k] = -np.inf
            if sizes[k] == 0:
                if fresh >= 0:
                    continue
                fresh = k
                totals[k] = 0.0
                products[k] = 0.0
            mass = float(sizes[k]) if sizes[k] > 0 else alpha
            weights[k] = math.log(mass) + log_predictive(
                w, sizes[k], totals[k], products[k], mean0, kappa0, degrees0, scale0
            )
            best = max(best, weights[k])
        total = 0.0
        for k in range(slots):
            weights[k] = math.exp(weights[k] - best)
            total += weights[k]
        remaining, chosen = uniforms[j] * total, 0
        for k in range(slots):
            if weights[k] > 0.0:
                chosen = k
                remaining -= weights[k]
                if remaining <= 0.0:
                    break
        assignments[j] = chosen
        sizes[chosen] += 1
        totals[chosen] += w
        products[chosen] += np.outer(w, w)
    return assignments


def draw_components(
    rng: np.random.Generator, frequencies: Floats, assignments: Ints, base: BaseMeasure
) -> Components:
    """Mean and precision of each component given its members (normal-inverse-Wishart)."""
    means, precisions = [], []
    for c in range(int(assignments.max()) + 1):
        members = frequencies[assignments == c]
        n = len(members)
        centre = members.mean(axis=0)
        kappa, degrees = base.kappa + n, base.degrees + n
        away = centre - base.mean
        scale = base.scale + (members - centre).T @ (members - centre)
        scale = scale + base.kappa * n / kappa * np.outer(away, away)
        precision = draw_wishart(rng, degrees, np.linalg.inv(scale))
        mean = (base.kappa * base.mean + n * centre) / kappa
        factor = np.linalg.cholesky(kappa * precision)
        means.append(mean + np.linalg.solve(factor.T, rng.standard_normal(len(mean))))
        precisions.append(precision)
    return Components(np.array(means), np.array(precisions))


def draw_wishart(rng: np.random.Generator, degrees: float, scale: Floats) -> Floats:
    """A Wishart matrix with expectation ``degrees * scale`` (Bartlett's decomposition)."""
    m = len(scale)
    lower = np.tril(rng.standard_normal((m, m)), -1)
    lower[np.diag_indices(m)] = np.sqrt(rng.chisquare(degrees - np.arange(m)))
    factor = np.linalg.cholesky(scale) @ lower
    return factor @ factor.T


def draw_concentration(
    rng: np.random.Generator, alpha: float, components: int, count: int, prior: tuple[float, float]
) -> float:
    """alpha given the number of components of ``count`` members (Escobar and West, 1995)."""
    shape, rate = prior
    auxiliary = rng.beta(alpha + 1.0, count)
    rate = rate - math.log(auxiliary)
    odds = (shape + components - 1.0) / (count * rate)
    is_first = rng.random() < odds / (1.0 + odds)
    return float(rng.gamma(shape + components - (0 if is_first else 1), 1.0 / rate))
