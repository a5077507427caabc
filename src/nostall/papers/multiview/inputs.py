"""Standardised views of the items that a classifier reads, linear or as random features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nostall.core.errors import BadInput
from nostall.papers.multiview.priors import Floats
from nostall.papers.multiview.views import View


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
