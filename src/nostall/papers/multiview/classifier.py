"""The multi-view classifier with scikit-learn's interface.

Standardised views of the items that a classifier reads, linear or as random features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from nostall.core.errors import BadInput
from nostall.papers.multiview.sampler import Model, State, first_state, monitored, sweep
from nostall.papers.multiview.views import (
    BaseMeasure,
    Floats,
    Priors,
    Spectrum,
    View,
    ViewParameters,
    expected_features,
    latent_posterior,
)
from nostall.workload.learning.diagnostics import fit_temperature, softmax


@dataclass(frozen=True)
class Standard:
    """Mean and standard deviation of columns; constant columns keep their scale."""

    centre: Floats
    deviation: Floats

    @classmethod
    def of(cls, values: Floats) -> Standard:
        """Moments of the values that are not NaN."""
        present = ~np.isnan(values)
        counts = np.maximum(1, present.sum(axis=0))
        centre = np.where(present, values, 0.0).sum(axis=0) / counts
        squares = np.where(present, (values - centre) ** 2, 0.0).sum(axis=0) / counts
        deviation = np.sqrt(squares)
        return cls(centre, np.where(deviation > 0, deviation, 1.0))

    def apply(self, values: Floats) -> Floats:
        standard: Floats = (values - self.centre) / self.deviation
        return standard


@dataclass(frozen=True)
class Inputs:
    """Maps the columns of X to views, as they were standardised in training."""

    widths: tuple[int, ...]
    columns: tuple[Standard, ...]
    """Moments of each view's columns."""
    frequencies: tuple[Floats, ...] = ()
    """Random frequencies of each view, (features / 2, width); empty for linear views."""
    features: tuple[Standard, ...] = field(default=())
    """Moments of each view's random features."""

    @classmethod
    def of(cls, X: Floats, widths: Sequence[int], features: int, seed: int) -> Inputs:
        """Inputs for items X.

        With ``features`` above 0, a view is that many random Fourier features of a Gaussian kernel,
        whose width is the root of half the mean squared distance of two items.  A linear view of
        them is a nonlinear view of the columns.
        """
        parts = _parts(X, widths)
        columns = tuple(Standard.of(part) for part in parts)
        linear = cls(tuple(widths), columns)
        if features <= 0:
            return linear
        generators = (np.random.default_rng([seed, number]) for number in range(len(widths)))
        frequencies = tuple(
            rng.standard_normal((max(1, features // 2), width)) / np.sqrt(width)
            for rng, width in zip(generators, widths, strict=True)
        )
        mapped = [
            _map(standard.apply(part), frequency)
            for standard, part, frequency in zip(columns, parts, frequencies, strict=True)
        ]
        return cls(tuple(widths), columns, frequencies, tuple(map(Standard.of, mapped)))

    def views(self, X: Floats) -> list[View]:
        """The views of items X; raises :class:`BadInput` for an item with a part of a view."""
        views = []
        for number, part in enumerate(_parts(X, self.widths)):
            missing = np.isnan(part)
            partial = missing.any(axis=1) & ~missing.all(axis=1)
            if partial.any():
                raise BadInput(
                    f"item {int(partial.argmax())} has NaN in a part of view {number}; an item "
                    "without a view has NaN in all columns of the view; fill in single values"
                )
            values = self.columns[number].apply(part)
            if self.frequencies:
                values = self.features[number].apply(_map(values, self.frequencies[number]))
            present = np.asarray(~missing.any(axis=1), dtype=np.bool_)
            views.append(View(np.where(present[:, None], values, 0.0), present))
        return views


def _parts(X: Floats, widths: Sequence[int]) -> list[Floats]:
    """The columns of each view."""
    return np.split(X, np.cumsum(widths)[:-1], axis=1)


def _map(values: Floats, frequencies: Floats) -> Floats:
    """Cosines and sines of the phases; NaN where the view is missing."""
    phases = values @ frequencies.T
    return np.hstack([np.cos(phases), np.sin(phases)])


Ints = NDArray[np.int64]


@dataclass(eq=False, repr=False)
class MaxMarginMultiView(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier of items with several views; implements the model of arXiv:1910.05250.

    The columns of X are the views side by side.  An item without a view has NaN in all columns of
    that view; such views are marginalised in training and prediction.  Time and memory are linear
    in the number of items.
    """

    views: Sequence[int] | None = None
    """Numbers of columns of the views; None for one view of all columns."""
    _: KW_ONLY
    dimensions: int = 20
    """m, the dimensions of the latent space."""
    features: int = 80
    """M, the random frequencies; there are twice as many features."""
    view_features: int = 0
    """Random Fourier features of each view, whose linear functions are nonlinear views; 0 for
    linear functions of the columns."""
    spectrum: Spectrum = "adaptive"
    """``adaptive`` (Dirichlet-process mixture) or ``fixed`` (Gaussian kernel)."""
    sweeps: int = 100
    """Sweeps of each chain, of which ``burn_in`` are dropped."""
    burn_in: int = 50
    chains: int = 1
    bandwidth: float = 1.0
    """Width of the expected kernel in units of the distance of two items."""
    cost: float = 1.0
    """C, the weight of the hinge loss."""
    margin: float = 1.0
    """l, the margin of the hinge loss."""
    calibration_folds: int = 0
    """Folds of a cross-validation that fits the temperature of the probabilities; 0 for none."""
    warm_start: bool = False
    """``fit`` continues the chains of the last ``fit`` on the same data up to ``sweeps``; the
    result is that of one longer ``fit``."""
    random_state: int = 0

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any) -> MaxMarginMultiView:
        """Run the chains on items X (N, columns) with classes y (N,)."""
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite="allow-nan")
        check_classification_targets(y)
        self._chains: list[Any]
        self.classes_, classes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BadInput(
                f"all {len(y)} labelled items are of one class ({self.classes_[0]}); a "
                "classifier needs at least two; add items of another class"
            )
        self.widths_ = self._widths(X.shape[1])
        model = self._model(X, classes)
        is_continued = self.warm_start and hasattr(self, "_chains")
        chains = self._chains if is_continued else self._first_chains(model)
        self._chains = [self._run(model, *chain) for chain in chains]
        self.temperature_ = 1.0
        if self.calibration_folds > 1:
            self.temperature_ = self._cross_validated_temperature(X, y)
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each item."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(axis=1)])

    def predict_proba(self, X: Any) -> Floats:
        """Probability of each class, averaged over the draws of all chains, shape (N, K)."""
        total: Floats = softmax(self.decision_draws(X), self.temperature_).mean(axis=0)
        return total

    def decision_draws(self, X: Any) -> Floats:
        """Logits by draw, item and class: the gain in pseudo-likelihood of the positive label."""
        check_is_fitted(self, "classes_")
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        views = self._inputs.views(X)
        groups = _rows_by_views(views)
        draws = [draw for *_, kept, _ in self._chains for draw in kept]
        logits = np.empty((len(draws), len(X), len(self.classes_)))
        for number, (parameters, frequencies, weights) in enumerate(draws):
            for rows in groups:
                mean, covariance = latent_posterior(views, parameters, rows)
                scores = expected_features(mean, covariance, frequencies) @ weights
                gain = np.maximum(0.0, self.margin + scores) - np.maximum(0.0, self.margin - scores)
                logits[number, rows] = 2 * self.cost * gain
        return logits

    @property
    def trace_(self) -> list[dict[str, float]]:
        """The monitored scalars of the first chain after each kept sweep."""
        return list(self._chains[0][-1])

    def _check_parameters(self) -> None:
        for name in ("dimensions", "features", "sweeps", "chains"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)}; allowed is a number of at least 1")
        if not 0 <= self.burn_in < self.sweeps:
            raise BadInput(
                f"burn_in={self.burn_in} with sweeps={self.sweeps}; allowed is 0 to sweeps - 1"
            )
        if self.view_features < 0:
            raise BadInput(f"view_features={self.view_features}; allowed is a number of at least 0")
        if self.spectrum not in ("adaptive", "fixed"):
            raise BadInput(f"spectrum={self.spectrum!r}; allowed are 'adaptive' and 'fixed'")

    def _widths(self, columns: int) -> tuple[int, ...]:
        widths = (columns,) if self.views is None else tuple(int(w) for w in self.views)
        if not widths or min(widths) < 1 or sum(widths) != columns:
            raise BadInput(
                f"views={self.views} for X with {columns} columns; allowed are numbers of columns "
                "of at least 1 whose sum is the number of columns of X"
            )
        return widths

    def _model(self, X: Floats, classes: Ints) -> Model:
        """Standardise the views and put the data together."""
        self._inputs = Inputs.of(X, self.widths_, self.view_features, self.random_state)
        views = self._inputs.views(X)
        for number, view in enumerate(views):
            if not view.present.any():
                raise BadInput(
                    f"view {number} is missing in all {len(X)} items; leave its columns out"
                )
        signs = np.where(classes[:, None] == np.arange(len(self.classes_)), 1.0, -1.0)
        priors = Priors(cost=self.cost, margin=self.margin, bandwidth=self.bandwidth)
        base = BaseMeasure.of(self.dimensions, priors)
        return Model(tuple(views), signs, priors, base, self.spectrum)

    def _first_chains(self, model: Model) -> list[Any]:
        seeds = np.random.SeedSequence(self.random_state).spawn(self.chains)
        rngs = [np.random.default_rng(seed) for seed in seeds]
        return [(rng, first_state(rng, model, self.features), [], []) for rng in rngs]

    def _run(
        self,
        model: Model,
        rng: np.random.Generator,
        state: State,
        kept: list[tuple[tuple[ViewParameters, ...], Floats, Floats]],
        trace: list[dict[str, float]],
    ) -> Any:
        """Continue one chain up to ``sweeps`` sweeps."""
        while state.sweeps < self.sweeps:
            state = sweep(rng, model, state, adapt=state.sweeps < self.burn_in)
            if state.sweeps > self.burn_in:
                kept.append((state.parameters, state.frequencies, state.weights))
                trace.append(monitored(model, state))
        return rng, state, kept, trace

    def _cross_validated_temperature(self, X: Floats, y: NDArray[Any]) -> float:
        from sklearn.base import clone
        from sklearn.model_selection import StratifiedKFold

        _, classes, counts = np.unique(y, return_inverse=True, return_counts=True)
        folds = min(self.calibration_folds, int(counts.min()))
        if folds < 2:
            return 1.0
        splits = StratifiedKFold(folds, shuffle=True, random_state=self.random_state)
        parts, held_out = [], []
        for train, test in splits.split(X, classes):
            part = clone(self).set_params(calibration_folds=0, warm_start=False)
            parts.append(part.fit(X[train], classes[train]).decision_draws(X[test]))
            held_out.append(classes[test])
        return fit_temperature(np.concatenate(parts, axis=1), np.concatenate(held_out))


def _rows_by_views(views: Sequence[View]) -> list[Ints]:
    """Row numbers of the items with the same views present, one array per combination."""
    present = np.column_stack([view.present for view in views])
    _, combination = np.unique(present, axis=0, return_inverse=True)
    combination = combination.reshape(-1)
    return [np.flatnonzero(combination == c) for c in range(int(combination.max()) + 1)]
