"""States of the multi-view model drawn from its joint distribution, and its sampler's steps.

The label term is a pseudo-likelihood that is not normalised in y, so labels cannot be drawn.  Steps
without labels start from the joint distribution of all other unknowns (``cost`` 0 switches the
label term off).  Steps with labels start from their exact distribution on a grid, whose density is
written here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from nostall.papers.multiview.sampler import (
    Components,
    Model,
    State,
    StepSize,
    draw_assignments,
    draw_components,
    draw_frequencies,
    draw_latent,
    draw_scales,
    draw_variance,
    draw_weights,
    sweep,
)
from nostall.papers.multiview.views import (
    BaseMeasure,
    LabelTerm,
    Priors,
    View,
    ViewParameters,
    draw_view,
)
from nostall.workload.learning.topics.classifier import draw_topic_concentration
from tests.unit.workload.learning.invariance import Statistics

ITEMS, DIMENSIONS, FREQUENCIES = 5, 2, 5
WIDTHS = (3, 2)
PRIORS = Priors(
    cost=0.0, noise=(3.0, 2.0), relevance=(3.0, 2.0), offset_precision=1.0, weights=(3.0, 2.0),
    concentration=(2.0, 2.0), extra_degrees=6.0, mean_weight=0.5,
)  # fmt: skip
BASE = BaseMeasure.of(DIMENSIONS, PRIORS)
MISSING = (1, 0)
"""A view and the item that lacks it."""
Floats = np.ndarray


def draw_state(rng: np.random.Generator) -> tuple[Model, State, Components]:
    """Data, unknowns and mixture components from the joint distribution without labels."""
    latent = rng.standard_normal((ITEMS, DIMENSIONS))
    views, parameters = [], []
    for number, width in enumerate(WIDTHS):
        relevance = rng.gamma(PRIORS.relevance[0], 1 / PRIORS.relevance[1], DIMENSIONS)
        loadings = rng.standard_normal((width, DIMENSIONS)) / np.sqrt(relevance)
        offset = rng.standard_normal(width) / np.sqrt(PRIORS.offset_precision)
        noise = float(rng.gamma(PRIORS.noise[0], 1 / PRIORS.noise[1]))
        values = latent @ loadings.T + offset
        values = values + rng.standard_normal(values.shape) / np.sqrt(noise)
        present = np.ones(ITEMS, bool)
        if number == MISSING[0]:
            present[MISSING[1]] = False
            values[MISSING[1]] = 0.0
        views.append(View(values, present))
        parameters.append(ViewParameters(loadings, offset, noise, relevance))
    alpha = float(rng.gamma(PRIORS.concentration[0], 1 / PRIORS.concentration[1]))
    assignments = _restaurant(rng, alpha)
    components = _components(rng, int(assignments.max()) + 1)
    factors = np.linalg.cholesky(np.linalg.inv(components.precisions))[assignments]
    noise = rng.standard_normal((FREQUENCIES, DIMENSIONS))
    frequencies = components.means[assignments] + np.einsum("jik,jk->ji", factors, noise)
    variance = float(1 / rng.gamma(PRIORS.weights[0], 1 / PRIORS.weights[1]))
    weights = rng.standard_normal((2 * FREQUENCIES, 1)) * np.sqrt(variance)
    state = State(latent, tuple(parameters), frequencies, assignments, alpha, weights, variance,
                  StepSize(0.7), StepSize(0.5))  # fmt: skip
    model = Model(tuple(views), np.ones((ITEMS, 1)), PRIORS, BASE, "adaptive")
    return model, state, components


def _restaurant(rng: np.random.Generator, alpha: float) -> np.ndarray:
    """Assignments from the Chinese restaurant process."""
    assignments, sizes = np.zeros(FREQUENCIES, np.int64), [1.0]
    for j in range(1, FREQUENCIES):
        masses = np.array([*sizes, alpha])
        assignments[j] = rng.choice(len(masses), p=masses / masses.sum())
        if assignments[j] == len(sizes):
            sizes.append(0.0)
        sizes[assignments[j]] += 1
    return assignments


def _components(rng: np.random.Generator, count: int) -> Components:
    """Means and precisions from the normal-inverse-Wishart base measure, by sums of squares."""
    from scipy.stats import wishart

    scale = np.linalg.inv(BASE.scale)
    precisions = np.array(
        [np.atleast_2d(wishart.rvs(BASE.degrees, scale, random_state=rng)) for _ in range(count)]
    )
    covariances = np.linalg.inv(precisions) / BASE.kappa
    means = np.array([rng.multivariate_normal(BASE.mean, c) for c in covariances])
    return Components(means, precisions)


def statistics(model: Model, state: State, components: Components | None = None) -> Statistics:
    """Scalars of all unknowns and of their fit to the data."""
    result: dict[str, float] = {
        "latent squares": float((state.latent**2).mean()),
        "latent": float(state.latent.sum()),
        "log alpha": float(np.log(state.concentration)),
        "components": float(state.assignments.max() + 1),
        "log alpha, components": float(np.log(state.concentration) * (state.assignments.max() + 1)),
        "log nu": float(np.log(state.variance)),
        "scaled weights": float((state.weights**2).sum() / state.variance),
        "log frequency squares": float(np.log((state.frequencies**2).sum())),
    }
    same = state.assignments[:, None] == state.assignments[None, :]
    gaps = ((state.frequencies[:, None] - state.frequencies[None, :]) ** 2).sum(-1)
    result["same component"] = float(same.mean())
    result["log gaps in components"] = float((np.log1p(gaps) * same).mean())
    for number, (view, p) in enumerate(zip(model.views, state.parameters, strict=True)):
        residual = (view.values - p.offset - state.latent @ p.loadings.T)[view.present]
        result |= {
            f"log noise {number}": float(np.log(p.noise_precision)),
            f"offset {number}": float(p.offset.sum()),
            f"offset squares {number}": float((p.offset**2).sum()),
            f"log loadings {number}": float(np.log((p.loadings**2).sum())),
            f"scaled loadings {number}": float((p.loadings**2 * p.relevance).sum()),
            f"log relevance {number}": float(np.log(p.relevance).sum()),
            f"scaled residual {number}": float(p.noise_precision * (residual**2).sum()),
        }
    if components is not None:
        away = state.frequencies - components.means[state.assignments]
        precisions = components.precisions[state.assignments]
        result |= {
            "log determinants": float(np.linalg.slogdet(components.precisions)[1].mean()),
            "means": float(components.means.sum()),
            "scaled frequencies": float(np.einsum("ji,jik,jk->", away, precisions, away)),
            "scaled means": float(
                np.einsum("ci,cik,ck->", components.means, components.precisions, components.means)
                / len(components.means)
            ),
        }
    return result


def _no_labels(state: State) -> LabelTerm:
    return LabelTerm(np.ones((ITEMS, 1)), np.ones((ITEMS, 1)), 0 * state.weights, 0.0, 1.0)


Step = Callable[[np.random.Generator, Model, State, Components], tuple[State, Components | None]]


def _views(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    drawn = tuple(
        draw_view(rng, view, state.latent, old, model.priors)
        for view, old in zip(model.views, state.parameters, strict=True)
    )
    return replace(state, parameters=drawn), components


def _latent(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    latent, _ = draw_latent(
        rng, state.latent, state.frequencies, model.views, state.parameters, _no_labels(state), 0.8
    )
    return replace(state, latent=latent), components


def _assignments(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    drawn = draw_assignments(
        rng, state.frequencies, state.assignments, state.concentration, model.base
    )
    return replace(state, assignments=drawn), None


def _component_parameters(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    return state, draw_components(rng, state.frequencies, state.assignments, model.base)


def _frequencies(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    means, precisions = (part[state.assignments] for part in components)
    drawn, _ = draw_frequencies(
        rng, state.frequencies, state.latent, means, precisions, _no_labels(state), 0.8
    )
    return replace(state, frequencies=drawn), components


def _concentration(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    drawn = draw_topic_concentration(
        rng, state.concentration, len(components.means), FREQUENCIES, PRIORS.concentration
    )
    return replace(state, concentration=drawn), components


def _variance(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    return replace(state, variance=draw_variance(rng, state.weights, PRIORS)), components


def _sweep(
    rng: np.random.Generator, model: Model, state: State, components: Components
) -> tuple[State, Components | None]:
    return sweep(rng, model, state, adapt=False), None


STEPS: dict[str, Step] = {
    "views": _views,
    "latent": _latent,
    "assignments": _assignments,
    "components": _component_parameters,
    "frequencies": _frequencies,
    "concentration": _concentration,
    "variance": _variance,
    "sweep": _sweep,
}


def view_pair(step: Step) -> Callable[[np.random.Generator], tuple[Statistics, Statistics]]:
    """Statistics before and after a step without labels."""

    def pair(rng: np.random.Generator) -> tuple[Statistics, Statistics]:
        model, state, components = draw_state(rng)
        after, drawn = step(rng, model, state, components)
        before = statistics(model, state, components if drawn is not None else None)
        return before, statistics(model, after, drawn)

    return pair


# Steps with labels.  C, l and the grid of exact distributions.
COST, MARGIN = 0.8, 1.0
LABEL_PRIORS = Priors(cost=COST, margin=MARGIN)
_GRID = np.linspace(-6.0, 6.0, 481)


def _from_grid(rng: np.random.Generator, log_density: Floats) -> float:
    """A draw from a density on the grid."""
    bounds = np.cumsum(np.exp(log_density - log_density.max()))
    place = int(np.searchsorted(bounds, rng.random() * bounds[-1]))
    return float(_GRID[place] + (rng.random() - 0.5) * (_GRID[1] - _GRID[0]))


PHI = np.array([[0.9, 0.2], [-0.5, 0.8], [0.3, -1.0], [1.1, 0.6], [-0.2, -0.4]])
SIGNS = np.array([[1.0], [-1.0], [1.0], [1.0], [-1.0]])
VARIANCE = 1.5


def _hinge_density() -> Floats:
    """Log density of two weights on the grid: exp(-2 C max(0, l - y f)) and a normal prior."""
    first, second = np.meshgrid(_GRID, _GRID, indexing="ij")
    log_density = -(first**2 + second**2) / (2 * VARIANCE)
    for phi, sign in zip(PHI, SIGNS[:, 0], strict=True):
        score = phi[0] * first + phi[1] * second
        log_density -= 2 * COST * np.maximum(0.0, MARGIN - sign * score)
    return log_density


_BOUNDS = np.cumsum(np.exp(_hinge_density()).ravel())


def weights_pair(rng: np.random.Generator) -> tuple[Statistics, Statistics]:
    """Weights of the hinge loss before and after the augmentation and the normal draw."""
    place = int(np.searchsorted(_BOUNDS, rng.random() * _BOUNDS[-1]))
    cell = np.array([_GRID[place // len(_GRID)], _GRID[place % len(_GRID)]])
    weights = cell + (rng.random(2) - 0.5) * (_GRID[1] - _GRID[0])

    def described(eta: Floats) -> Statistics:
        scores = PHI @ eta
        hinge = np.maximum(0.0, MARGIN - SIGNS[:, 0] * scores).sum()
        return {"first": eta[0], "second": eta[1], "squares": float(eta @ eta), "hinge": hinge}

    scales = draw_scales(rng, SIGNS, (PHI @ weights)[:, None], LABEL_PRIORS)
    drawn = draw_weights(rng, PHI, SIGNS, scales, VARIANCE, LABEL_PRIORS)[:, 0]
    return described(weights), described(drawn)


_SCALES = np.array([[0.4], [1.3], [0.2]])
_LABELS = np.array([[1.0], [-1.0], [1.0]])
_ETA = np.array([[1.4], [-0.9]])
_VALUES, _NOISE, _LOADING, _OFFSET = np.array([[0.5], [-1.2], [0.1]]), 1.7, 0.8, 0.2


def _label_energy(phases: Floats, row: int) -> Floats:
    """t^2 / (2 s) with t = s + C (l - y f) of one item, for one frequency."""
    scores = np.cos(phases) * _ETA[0, 0] + np.sin(phases) * _ETA[1, 0]
    scale = _SCALES[row, 0]
    t = scale + COST * (MARGIN - _LABELS[row, 0] * scores)
    energy: Floats = t * t / (2 * scale)
    return energy


def latent_pair(rng: np.random.Generator) -> tuple[Statistics, Statistics]:
    """Latent positions of three items given labels and scales; one dimension, one frequency."""
    frequency = 1.6
    views = [View(_VALUES, np.array([True, True, False]))]
    parameters = [ViewParameters(np.array([[_LOADING]]), np.array([_OFFSET]), _NOISE, np.ones(1))]
    drawn = []
    for row in range(3):
        log_density = -0.5 * _GRID**2 - _label_energy(frequency * _GRID, row)
        if views[0].present[row]:
            residual = _VALUES[row, 0] - _OFFSET - _LOADING * _GRID
            log_density = log_density - 0.5 * _NOISE * residual**2
        drawn.append(_from_grid(rng, log_density))
    latent = np.array(drawn)[:, None]
    labels = LabelTerm(_LABELS, _SCALES, _ETA, COST, MARGIN)
    after, _ = draw_latent(rng, latent, np.array([[frequency]]), views, parameters, labels, 0.9)

    def described(z: Floats) -> Statistics:
        rows = {f"{part} {row}": float(value) for row in range(3) for part, value in (
            ("position", z[row, 0]), ("square", z[row, 0] ** 2),
            ("cosine", np.cos(2 * z[row, 0])),
        )}  # fmt: skip
        return rows | {"product": float(z[0, 0] * z[1, 0]), "product 2": float(z[1, 0] * z[2, 0])}

    return described(latent), described(after)


def frequency_pair(rng: np.random.Generator) -> tuple[Statistics, Statistics]:
    """One frequency of one dimension given the positions, labels and scales of three items."""
    latent, mean, precision = np.array([[0.9], [-1.1], [0.4]]), 0.3, 0.8
    log_density = -0.5 * precision * (_GRID - mean) ** 2
    for row in range(3):
        log_density = log_density - _label_energy(latent[row, 0] * _GRID, row)
    start = np.array([[_from_grid(rng, log_density)]])
    labels = LabelTerm(_LABELS, _SCALES, _ETA, COST, MARGIN)
    after, _ = draw_frequencies(
        rng, start, latent, np.array([[mean]]), np.array([[[precision]]]), labels, 0.5
    )

    def described(w: Floats) -> Statistics:
        value = float(w[0, 0])
        return {"frequency": value, "square": value**2, "cosine": float(np.cos(2 * value))}

    return described(start), described(after)


LABEL_PAIRS: dict[str, Callable[[np.random.Generator], tuple[Statistics, Statistics]]] = {
    "weights given labels": weights_pair,
    "latent given labels": latent_pair,
    "frequencies given labels": frequency_pair,
}
