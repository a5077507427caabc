"""Temperature scaling of class probabilities, and the expected calibration error."""

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


def calibration_error(probabilities: Floats, classes: NDArray[np.int64], bins: int = 10) -> float:
    """Expected calibration error: |confidence - accuracy|, averaged over bins of confidence."""
    confidence = probabilities.max(axis=1)
    is_right = probabilities.argmax(axis=1) == classes
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    error = 0.0
    for b in range(bins):
        members = bin_of == b
        if members.any():
            gap = abs(confidence[members].mean() - is_right[members].mean())
            error += members.mean() * gap
    return float(error)
