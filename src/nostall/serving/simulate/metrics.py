"""Metrics of a simulated trace: throughput, time to first token, time between tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of a time, in seconds."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Floats) -> Distribution:
        """The distribution of values; zeros if there are none."""
        if not len(values):
            return Distribution(0.0, 0.0, 0.0)
        p50, p99 = np.percentile(values, [50, 99])
        return Distribution(float(values.mean()), float(p50), float(p99))


@dataclass(frozen=True)
class Metrics:
    """Metrics of one simulation; all times are modelled."""

    policy: str
    requests: int
    rejected: int
    """Requests that the KV cache cannot hold."""
    duration_s: float
    """Time from the first arrival to the last token."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens that a cached prefix spared; those of re-computed requests are not counted."""
    time_to_first_token: Distribution
    time_between_tokens: Distribution
    latency: Distribution
    """From arrival to the last token."""
    steps: int
    busy_s: float
    """Time of all steps."""
    mean_step_tokens: float
    preemptions: int
    extrapolated_steps: int
    """Steps larger than all measured ones."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return (self.requests - self.rejected) / self.duration_s if self.duration_s else 0.0
