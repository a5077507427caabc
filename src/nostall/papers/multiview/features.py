"""Random Fourier features of the latent space, and the label term of the posterior.

With frequencies Om (M x m), phi(z) = M^-1/2 [cos Om z; sin Om z] approximates the shift-invariant
kernel whose spectrum the frequencies are drawn from (Bochner's theorem).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.papers.multiview.priors import Floats


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
