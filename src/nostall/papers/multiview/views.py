"""Linear Gaussian views of the latent space: x^v ~ N(W_v z + mu_v, I / tau_v).

Random Fourier features of the latent space, and the label term of the posterior.

With frequencies Om (M x m), phi(z) = M^-1/2 [cos Om z; sin Om z] approximates the shift-invariant
kernel whose spectrum the frequencies are drawn from (Bochner's theorem).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Spectrum = Literal["adaptive", "fixed"]
"""``adaptive``: the frequencies are a Dirichlet-process mixture and are sampled.  ``fixed``: they
are drawn once, which is the Gaussian kernel."""


@dataclass(frozen=True, slots=True)
class Priors:
    """Hyper-parameters of the model; Gamma distributions are (shape, rate)."""

    margin: float = 1.0
    """l, the margin of the hinge loss."""
    cost: float = 1.0
    """C, the weight of the hinge loss."""
    noise: tuple[float, float] = (1e-2, 1e-2)
    """Gamma prior of tau_v, the precision of a view's noise."""
    relevance: tuple[float, float] = (1e-2, 1e-2)
    """Gamma prior of r_vj, the precision of a view's loadings on latent dimension j."""
    offset_precision: float = 1e-2
    """Precision of the prior of mu_v, the offset of a view."""
    weights: tuple[float, float] = (1.0, 1.0)
    """Gamma prior of 1/nu, the precision of the classifier's weights."""
    concentration: tuple[float, float] = (1.0, 1.0)
    """Gamma prior of alpha, the concentration of the Dirichlet process."""
    bandwidth: float = 1.0
    """b, the width of the expected kernel."""
    mean_weight: float = 1.0
    """kappa_0 of the normal-inverse-Wishart base measure."""
    extra_degrees: float = 2.0
    """nu_0 - m, the degrees of freedom of the base measure beyond the latent dimension."""


@dataclass(frozen=True, slots=True)
class BaseMeasure:
    """Normal-inverse-Wishart base measure of frequencies of dimension m.

    Its expected covariance is I / (b^2 m) for the bandwidth b, so w'z has the standard deviation
    1/b for a standard normal z.  With a small bandwidth the kernel is so narrow that items say
    nothing about each other.
    """

    mean: Floats
    """mu_0, shape (m,)."""
    kappa: float
    degrees: float
    scale: Floats
    """S_0, shape (m, m)."""

    @classmethod
    def of(cls, dimensions: int, priors: Priors) -> BaseMeasure:
        """The base measure for a latent space of ``dimensions`` dimensions."""
        degrees = dimensions + priors.extra_degrees
        variance = 1.0 / (priors.bandwidth**2 * dimensions)
        scale = np.eye(dimensions) * (degrees - dimensions - 1) * variance
        return cls(np.zeros(dimensions), priors.mean_weight, degrees, scale)


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
    # The rows of W_v are independent and share the precision tau Z'Z + diag(r).
    shared = old.noise_precision * z.T @ z + np.diag(old.relevance)
    loadings = draw_normal(rng, shared, old.noise_precision * z.T @ (values - old.offset)).T
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


def draw_normal(rng: np.random.Generator, precision: Floats, linear: Floats) -> Floats:
    """Draw from N(A^-1 b, A^-1) for a precision A (n, n), and b (n,) or each column of (n, k)."""
    factor = np.linalg.cholesky(precision)
    mean = np.linalg.solve(factor.T, np.linalg.solve(factor, linear))
    noise: Floats = np.linalg.solve(factor.T, rng.standard_normal(linear.shape))
    return mean + noise


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


def features(latent: Floats, frequencies: Floats) -> Floats:
    """phi of each row of ``latent``: (N, m) and (M, m) to (N, 2 M)."""
    phases = latent @ frequencies.T
    phi: Floats = np.hstack([np.cos(phases), np.sin(phases)]) / np.sqrt(len(frequencies))
    return phi


def expected_features(mean: Floats, covariance: Floats, frequencies: Floats) -> Floats:
    """E[phi(z)] for z ~ N(mean_n, covariance): (N, m), (m, m) and (M, m) to (N, 2 M).

    E[cos w'z] = cos(w'mean) exp(-w'covariance w / 2), and the same for the sine.
    """
    damping = np.exp(-0.5 * np.einsum("ji,ik,jk->j", frequencies, covariance, frequencies))
    phi: Floats = features(mean, frequencies) * np.tile(damping, 2)
    return phi


@dataclass(frozen=True, slots=True)
class LabelTerm:
    """The label term sum t^2 / (2 s), t = s + C (l - y f), given the augmentation s."""

    signs: Floats
    """y, -1 or 1, shape (N, K)."""
    scales: Floats
    """s, shape (N, K)."""
    weights: Floats
    """eta, shape (2 M, K)."""
    cost: float
    margin: float

    def energy(self, latent: Floats, frequencies: Floats) -> Floats:
        """The term of each item, shape (N,)."""
        scores = features(latent, frequencies) @ self.weights
        t = self.scales + self.cost * (self.margin - self.signs * scores)
        energies: Floats = (t * t / (2 * self.scales)).sum(axis=1)
        return energies

    def phase_gradient(self, latent: Floats, frequencies: Floats) -> Floats:
        """h, the gradient with respect to the phases Om z, shape (N, M).

        The gradient with respect to z_n is Om' h_n, and with respect to w_j it is sum_n h_nj z_n.
        """
        count = len(frequencies)
        phases = latent @ frequencies.T
        cosines, sines = np.cos(phases), np.sin(phases)
        of_cos, of_sin = self.weights[:count], self.weights[count:]
        scores = (cosines @ of_cos + sines @ of_sin) / np.sqrt(count)
        t = self.scales + self.cost * (self.margin - self.signs * scores)
        by_score = -self.cost * self.signs * t / self.scales
        sums = cosines * (by_score @ of_sin.T) - sines * (by_score @ of_cos.T)
        gradient: Floats = sums / np.sqrt(count)
        return gradient
