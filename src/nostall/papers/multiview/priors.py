"""Priors and sizes of the multi-view model."""

from __future__ import annotations

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
