"""Gibbs steps of the classifier: hinge-loss augmentation, weights, and their scale.

The pseudo-likelihood of a label is exp(-2 C max(0, l - y f)).  With u = l - y f it is
int_0^inf (2 pi s)^-1/2 exp(-(s + C u)^2 / (2 s)) ds, so given s the weights are Gaussian (Polson
and Scott's augmentation).
"""

from __future__ import annotations

import numpy as np

from nostall.papers.multiview.priors import Floats, Priors

_SMALLEST = 1e-6
"""Lower bound of C |u|: the inverse Gaussian distribution has no limit at 0."""


def draw_scales(rng: np.random.Generator, signs: Floats, scores: Floats, priors: Priors) -> Floats:
    """s given the scores: 1/s ~ InverseGaussian(1 / (C |u|), 1); shapes (N, K)."""
    violation = np.maximum(_SMALLEST, priors.cost * np.abs(priors.margin - signs * scores))
    inverse: Floats = rng.wald(1.0 / violation, 1.0)
    return 1.0 / np.maximum(inverse, 1e-300)


def draw_weights(
    rng: np.random.Generator,
    phi: Floats,
    signs: Floats,
    scales: Floats,
    variance: float,
    priors: Priors,
) -> Floats:
    """eta given s: normal with precision I/nu + C^2 Phi' diag(1/s) Phi; shape (2 M, K)."""
    cost, size = priors.cost, phi.shape[1]
    columns = []
    for k in range(signs.shape[1]):
        inverse = 1.0 / scales[:, k]
        precision = np.eye(size) / variance + cost**2 * (phi.T * inverse) @ phi
        target = signs[:, k] * (scales[:, k] + cost * priors.margin) * inverse
        columns.append(draw_normal(rng, precision, cost * (phi.T @ target)))
    return np.column_stack(columns)


def draw_variance(rng: np.random.Generator, weights: Floats, priors: Priors) -> float:
    """nu given the weights: 1/nu ~ Gamma(a + size / 2, b + |eta|^2 / 2)."""
    shape, rate = priors.weights
    precision = rng.gamma(shape + weights.size / 2, 1.0 / (rate + float((weights**2).sum()) / 2))
    return float(1.0 / precision)


def draw_normal(rng: np.random.Generator, precision: Floats, linear: Floats) -> Floats:
    """Draw from N(A^-1 b, A^-1) for a precision A (n, n) and b (n,)."""
    factor = np.linalg.cholesky(precision)
    mean = np.linalg.solve(factor.T, np.linalg.solve(factor, linear))
    noise: Floats = np.linalg.solve(factor.T, rng.standard_normal(len(linear)))
    return mean + noise
