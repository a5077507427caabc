"""One sweep of the Markov chain over all unknowns of the multi-view model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from nostall.papers.multiview.features import LabelTerm, features
from nostall.papers.multiview.hmc import StepSize, draw_frequencies, draw_latent
from nostall.papers.multiview.priors import BaseMeasure, Floats, Priors, Spectrum
from nostall.papers.multiview.spectrum import (
    draw_assignments,
    draw_components,
    draw_concentration,
)
from nostall.papers.multiview.views import View, ViewParameters, draw_view
from nostall.papers.multiview.weights import draw_scales, draw_variance, draw_weights


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
    concentration = draw_concentration(
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
