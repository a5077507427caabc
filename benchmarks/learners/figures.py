"""Figures of classifiers that several benchmarks report."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.workload.learning.diagnostics import Floats


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
