"""Linear Gaussian views of the latent space: x^v ~ N(W_v z + mu_v, I / tau_v)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.papers.multiview.priors import Floats, Priors

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class View:
    """Observations of one view."""

    values: Floats
    """(N, d); rows of items without this view are 0."""
    present: Bools
    """(N,): whether the item has this view."""


@dataclass(frozen=True, slots=True)
class ViewParameters:
    """Parameters of one view."""

    loadings: Floats
    """W_v, shape (d, m)."""
    offset: Floats
    """mu_v, shape (d,)."""
    noise_precision: float
    """tau_v."""
    relevance: Floats
    """r_v, precision of the loadings on each latent dimension, shape (m,)."""


def draw_view(
    rng: np.random.Generator, view: View, latent: Floats, old: ViewParameters, priors: Priors
) -> ViewParameters:
    """One Gibbs sweep over the parameters of a view, from the items that have it."""
    values, z = view.values[view.present], latent[view.present]
    columns, dimensions = old.loadings.shape
    loadings = _draw_loadings(rng, values - old.offset, z, old)
    residual = values - z @ loadings.T
    precision = len(values) * old.noise_precision + priors.offset_precision
    offset = old.noise_precision * residual.sum(axis=0) / precision
    offset = offset + rng.standard_normal(columns) / np.sqrt(precision)
    squares = float(((residual - offset) ** 2).sum())
    shape, rate = priors.noise
    noise = rng.gamma(shape + values.size / 2, 1.0 / (rate + squares / 2))
    shape, rate = priors.relevance
    norms = (loadings**2).sum(axis=0)
    relevance = rng.gamma(shape + columns / 2, 1.0 / (rate + norms / 2), size=dimensions)
    return ViewParameters(loadings, offset, float(noise), relevance)


def _draw_loadings(
    rng: np.random.Generator, centred: Floats, latent: Floats, old: ViewParameters
) -> Floats:
    """W_v: its rows are independent and share the precision A = tau Z'Z + diag(r)."""
    precision = old.noise_precision * latent.T @ latent + np.diag(old.relevance)
    factor = np.linalg.cholesky(precision)
    linear = old.noise_precision * latent.T @ centred
    mean = np.linalg.solve(factor.T, np.linalg.solve(factor, linear))
    noise = np.linalg.solve(factor.T, rng.standard_normal(mean.shape))
    loadings: Floats = (mean + noise).T
    return loadings


def latent_posterior(
    views: Sequence[View], parameters: Sequence[ViewParameters], rows: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Mean (len(rows), m) and covariance (m, m) of z given the views of items ``rows``.

    All items of ``rows`` must have the same views.  Missing views drop out of the product.
    """
    dimensions = parameters[0].loadings.shape[1]
    precision, linear = np.eye(dimensions), np.zeros((len(rows), dimensions))
    for view, p in zip(views, parameters, strict=True):
        if view.present[rows[0]]:
            precision += p.noise_precision * p.loadings.T @ p.loadings
            linear += p.noise_precision * (view.values[rows] - p.offset) @ p.loadings
    covariance = np.asarray(np.linalg.inv(precision), dtype=np.float64)
    return np.asarray(linear @ covariance), covariance


def view_energy(
    views: Sequence[View], parameters: Sequence[ViewParameters], latent: Floats
) -> Floats:
    """Per item: |z|^2 / 2 + sum over its views of tau |x - mu - W z|^2 / 2."""
    energy: Floats = 0.5 * (latent**2).sum(axis=1)
    for view, p in zip(views, parameters, strict=True):
        residual = view.values - p.offset - latent @ p.loadings.T
        energy = energy + 0.5 * p.noise_precision * view.present * (residual**2).sum(axis=1)
    return energy


def view_gradient(
    views: Sequence[View], parameters: Sequence[ViewParameters], latent: Floats
) -> Floats:
    """Gradient of :func:`view_energy` with respect to z, shape (N, m)."""
    gradient = latent.copy()
    for view, p in zip(views, parameters, strict=True):
        residual = view.values - p.offset - latent @ p.loadings.T
        gradient -= p.noise_precision * view.present[:, None] * (residual @ p.loadings)
    return gradient
