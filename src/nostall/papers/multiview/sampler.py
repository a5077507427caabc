"""One sweep of the Markov chain over all unknowns of the multi-view model.

Hamiltonian Monte Carlo of latent positions (per item) and of frequencies (all at once).

Dirichlet-process mixture over frequencies: Chinese-restaurant steps with conjugate components.

Each component is a normal distribution with a normal-inverse-Wishart prior.  Assignments integrate
the component's parameters out (Neal's algorithm 3); the parameters are then drawn for the
frequencies' HMC step.

Gibbs steps of the classifier: hinge-loss augmentation, weights, and their scale.

The pseudo-likelihood of a label is exp(-2 C max(0, l - y f)).  With u = l - y f it is
int_0^inf (2 pi s)^-1/2 exp(-(s + C u)^2 / (2 s)) ds, so given s the weights are Gaussian (Polson
and Scott's augmentation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.papers.multiview.views import (
    BaseMeasure,
    Floats,
    LabelTerm,
    Priors,
    Spectrum,
    View,
    ViewParameters,
    draw_normal,
    draw_view,
    features,
    view_energy,
    view_gradient,
)
from nostall.workload.learning.topics.classifier import draw_topic_concentration

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


@dataclass(frozen=True, slots=True)
class Model:
    """What stays the same during a chain."""

    views: tuple[View, ...]
    signs: Floats
    """y, -1 or 1 for each item and class, shape (N, K)."""
    priors: Priors
    base: BaseMeasure
    spectrum: Spectrum


@dataclass(frozen=True, slots=True)
class State:
    """All unknowns after a sweep."""

    latent: Floats
    """z, shape (N, m)."""
    parameters: tuple[ViewParameters, ...]
    frequencies: Floats
    """Om, shape (M, m)."""
    assignments: NDArray[np.int64]
    """Mixture component of each frequency, shape (M,)."""
    concentration: float
    """alpha."""
    weights: Floats
    """eta, shape (2 M, K)."""
    variance: float
    """nu."""
    latent_step: StepSize = field(default_factory=lambda: StepSize(0.3))
    frequency_step: StepSize = field(default_factory=lambda: StepSize(0.1))
    sweeps: int = 0


def first_state(rng: np.random.Generator, model: Model, count: int) -> State:
    """A start near a mode: principal components of the views; ``count`` frequencies."""
    dimensions = len(model.base.mean)
    values = np.hstack([view.values for view in model.views])
    left, singular, _ = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    used = min(dimensions, int((singular > 1e-9 * max(singular[0], 1e-300)).sum()))
    latent = rng.standard_normal((len(values), dimensions))
    latent[:, :used] = left[:, :used] * np.sqrt(len(values))
    parameters = tuple(
        ViewParameters(
            np.zeros((view.values.shape[1], dimensions)),
            np.zeros(view.values.shape[1]),
            1.0,
            np.ones(dimensions),
        )
        for view in model.views
    )
    scale = 1.0 / (model.priors.bandwidth * np.sqrt(dimensions))
    frequencies = scale * rng.standard_normal((count, dimensions))
    state = State(
        latent,
        parameters,
        frequencies,
        np.zeros(count, dtype=np.int64),
        1.0,
        np.zeros((2 * count, model.signs.shape[1])),
        1.0,
    )
    return _draw_views(rng, model, state)


def sweep(rng: np.random.Generator, model: Model, state: State, *, adapt: bool) -> State:
    """The next state; with ``adapt``, step sizes change, as they may only during burn-in."""
    state = _draw_views(rng, model, state)
    phi = features(state.latent, state.frequencies)
    scales = draw_scales(rng, model.signs, phi @ state.weights, model.priors)
    weights = draw_weights(rng, phi, model.signs, scales, state.variance, model.priors)
    variance = draw_variance(rng, weights, model.priors)
    labels = LabelTerm(model.signs, scales, weights, model.priors.cost, model.priors.margin)
    latent, acceptance = draw_latent(
        rng,
        state.latent,
        state.frequencies,
        model.views,
        state.parameters,
        labels,
        state.latent_step.value,
    )
    step = state.latent_step.adapted(acceptance) if adapt else state.latent_step
    state = replace(
        state,
        latent=latent,
        weights=weights,
        variance=variance,
        latent_step=step,
        sweeps=state.sweeps + 1,
    )
    if model.spectrum == "fixed":
        return state
    return _draw_spectrum(rng, model, state, labels, adapt=adapt)


def _draw_views(rng: np.random.Generator, model: Model, state: State) -> State:
    parameters = tuple(
        draw_view(rng, view, state.latent, old, model.priors)
        for view, old in zip(model.views, state.parameters, strict=True)
    )
    return replace(state, parameters=parameters)


def _draw_spectrum(
    rng: np.random.Generator, model: Model, state: State, labels: LabelTerm, *, adapt: bool
) -> State:
    """Draw the frequencies, their mixture components and the concentration."""
    base = model.base
    assignments = draw_assignments(
        rng, state.frequencies, state.assignments, state.concentration, base
    )
    components = draw_components(rng, state.frequencies, assignments, base)
    frequencies, acceptance = draw_frequencies(
        rng,
        state.frequencies,
        state.latent,
        components.means[assignments],
        components.precisions[assignments],
        labels,
        state.frequency_step.value,
    )
    count = len(frequencies)
    concentration = draw_topic_concentration(
        rng, state.concentration, len(components.means), count, model.priors.concentration
    )
    step = state.frequency_step.adapted(acceptance) if adapt else state.frequency_step
    return replace(
        state,
        frequencies=frequencies,
        assignments=assignments,
        concentration=concentration,
        frequency_step=step,
    )


def monitored(model: Model, state: State) -> dict[str, float]:
    """Scalars whose convergence is monitored."""
    scores = features(state.latent, state.frequencies) @ state.weights
    hinge = np.maximum(0.0, model.priors.margin - model.signs * scores)
    noise = [np.log(p.noise_precision) for p in state.parameters]
    return {
        "hinge loss": float(hinge.mean()),
        "log noise precision": float(np.mean(noise)),
        "log weight variance": float(np.log(state.variance)),
        "components": float(state.assignments.max() + 1),
    }
