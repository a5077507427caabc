"""Hamiltonian Monte Carlo of latent positions (per item) and of frequencies (all at once)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nostall.papers.multiview.features import LabelTerm
from nostall.papers.multiview.priors import Floats
from nostall.papers.multiview.views import (
    View,
    ViewParameters,
    view_energy,
    view_gradient,
)

STEPS = 5
"""Leapfrog steps of one proposal."""
TARGET_ACCEPTANCE = 0.8


@dataclass(frozen=True, slots=True)
class StepSize:
    """Step size of a sampler, adapted towards :data:`TARGET_ACCEPTANCE` during burn-in."""

    value: float
    updates: int = 0

    def adapted(self, acceptance: float) -> StepSize:
        """The step size after one more proposal (Robbins-Monro on the logarithm)."""
        gain = 1.0 / np.sqrt(self.updates + 1.0)
        value = float(self.value * np.exp(gain * (acceptance - TARGET_ACCEPTANCE)))
        return StepSize(min(max(value, 1e-4), 2.0), self.updates + 1)


def leapfrog(
    position: Floats,
    momentum: Floats,
    gradient: Callable[[Floats], Floats],
    velocity: Callable[[Floats], Floats],
    step: float,
) -> tuple[Floats, Floats]:
    """Integrate Hamilton's equations for :data:`STEPS` steps of size ``step``.

    ``velocity`` maps a momentum to M^-1 p for the mass matrix M.
    """
    momentum = momentum - 0.5 * step * gradient(position)
    for number in range(STEPS):
        position = position + step * velocity(momentum)
        half = 0.5 if number == STEPS - 1 else 1.0
        momentum = momentum - half * step * gradient(position)
    return position, momentum


def draw_latent(
    rng: np.random.Generator,
    latent: Floats,
    frequencies: Floats,
    views: Sequence[View],
    parameters: Sequence[ViewParameters],
    labels: LabelTerm,
    step: float,
) -> tuple[Floats, float]:
    """One proposal for each item; returns the new positions and the mean acceptance.

    The mass matrix is the precision of z given all views, so one factorisation serves all items.
    """
    mass = np.eye(latent.shape[1])
    for p in parameters:
        mass += p.noise_precision * p.loadings.T @ p.loadings
    factor, inverse = np.linalg.cholesky(mass), np.linalg.inv(mass)

    def energy(z: Floats) -> Floats:
        return view_energy(views, parameters, z) + labels.energy(z, frequencies)

    def gradient(z: Floats) -> Floats:
        by_phase = labels.phase_gradient(z, frequencies)
        return view_gradient(views, parameters, z) + by_phase @ frequencies

    def kinetic(p: Floats) -> Floats:
        halves: Floats = 0.5 * np.einsum("ni,ij,nj->n", p, inverse, p)
        return halves

    momentum = rng.standard_normal(latent.shape) @ factor.T
    before = energy(latent) + kinetic(momentum)
    position, momentum = leapfrog(latent, momentum, gradient, lambda p: p @ inverse, step)
    log_ratio = before - energy(position) - kinetic(momentum)
    accepted = np.log(rng.random(len(latent))) < log_ratio
    acceptance = float(np.exp(np.minimum(0.0, np.nan_to_num(log_ratio, nan=-np.inf))).mean())
    return np.where(accepted[:, None], position, latent), acceptance


def draw_frequencies(
    rng: np.random.Generator,
    frequencies: Floats,
    latent: Floats,
    means: Floats,
    precisions: Floats,
    labels: LabelTerm,
    step: float,
) -> tuple[Floats, float]:
    """One proposal for all frequencies; returns them and the acceptance probability.

    ``means`` (M, m) and ``precisions`` (M, m, m) are those of each frequency's mixture component;
    the precisions are also the mass matrices.
    """
    factors, inverses = np.linalg.cholesky(precisions), np.linalg.inv(precisions)

    def prior_gradient(w: Floats) -> Floats:
        product: Floats = np.einsum("jik,jk->ji", precisions, w - means)
        return product

    def energy(w: Floats) -> float:
        prior = 0.5 * float(((w - means) * prior_gradient(w)).sum())
        return prior + float(labels.energy(latent, w).sum())

    def gradient(w: Floats) -> Floats:
        return prior_gradient(w) + labels.phase_gradient(latent, w).T @ latent

    def velocity(p: Floats) -> Floats:
        product: Floats = np.einsum("jik,jk->ji", inverses, p)
        return product

    momentum = np.einsum("jik,jk->ji", factors, rng.standard_normal(frequencies.shape))
    before = energy(frequencies) + 0.5 * float((momentum * velocity(momentum)).sum())
    position, momentum = leapfrog(frequencies, momentum, gradient, velocity, step)
    log_ratio = before - energy(position) - 0.5 * float((momentum * velocity(momentum)).sum())
    acceptance = float(np.exp(min(0.0, log_ratio))) if np.isfinite(log_ratio) else 0.0
    is_accepted = rng.random() < acceptance
    return (position if is_accepted else frequencies), acceptance
