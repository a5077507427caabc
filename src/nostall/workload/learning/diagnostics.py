"""Calibration of the probabilities of classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TEMPERATURES = np.geomspace(0.05, 20.0, 241)


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """Softmax over the last axis of ``logits / temperature``."""
    scaled = logits / temperature
    exponentials = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def fit_temperature(logits: Floats, classes: NDArray[np.int64]) -> float:
    """The temperature with the least negative log-likelihood on held-out items.

    ``logits``: (N, K), or (draws, N, K) to average probabilities over draws; ``classes``: (N,).
    """
    draws = logits if logits.ndim == 3 else logits[None]
    rows = np.arange(len(classes))

    def loss(temperature: float) -> float:
        probabilities = softmax(draws, temperature).mean(axis=0)[rows, classes]
        return float(-np.log(np.maximum(probabilities, 1e-12)).mean())

    return float(min(_TEMPERATURES, key=lambda t: loss(float(t))))
