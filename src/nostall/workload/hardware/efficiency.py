"""Efficiency of a resource: a flat share of its peak rate, or a fitted curve over the size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.jobs.record import Resource

PUBLISHED_SHARE = 0.7
"""Efficiency on every resource that readers of arXiv:1910.05930 report (unverified)."""

MIN_SHARE = 1e-9
MAX_OVERHEAD = 1e6
"""Seconds."""


@dataclass(frozen=True, slots=True)
class EfficiencyCurve:
    """Time model of a resource: seconds = ``overhead`` + amount / (``share`` x peak rate).

    The efficiency of an amount ``a`` is share x a / (a + overhead x share x peak): it rises with
    the amount and is half of ``share`` at overhead x share x peak.  It is flat without overhead.
    """

    share: float
    """Share of the peak rate that large amounts reach, :data:`MIN_SHARE` to 1."""
    overhead: float = 0.0
    """Seconds that any amount costs, at most :data:`MAX_OVERHEAD`."""

    def __post_init__(self) -> None:
        if not MIN_SHARE <= self.share <= 1 or not 0 <= self.overhead <= MAX_OVERHEAD:
            raise BadInput(
                f"an efficiency curve has share {self.share!r} and overhead {self.overhead!r} s; "
                f"allowed are {MIN_SHARE:g} <= share <= 1 and 0 <= overhead <= {MAX_OVERHEAD:g}; "
                "correct the efficiency"
            )

    def seconds(self, amount: float, peak: float) -> float:
        """Modelled time of ``amount`` at ``peak`` per second; 0 for an amount of 0."""
        return self.overhead + amount / (self.share * peak) if amount > 0 else 0.0


Efficiency = Mapping[Resource, EfficiencyCurve]


def flat_efficiency(share: float = PUBLISHED_SHARE) -> Efficiency:
    """The same share of the peak for every resource and every amount."""
    return {resource: EfficiencyCurve(share) for resource in Resource}


@dataclass(frozen=True, slots=True)
class EfficiencyFit:
    """A curve fitted to measurements, and its relative errors on them."""

    curve: EfficiencyCurve
    mean_error: float
    worst_error: float
    points: int
    """Number of measurements."""


def fit_efficiency(
    amounts: Sequence[float], seconds: Sequence[float], peak: float
) -> EfficiencyFit:
    """Fit overhead and share to measured (amount, seconds) pairs by relative least squares.

    Errors are relative because measurements span decades and their noise grows with them.  If the
    unconstrained optimum has overhead < 0 or share > 1, the best point on those boundaries is used.
    Raises :class:`~nostall.core.errors.BadInput` for fewer than two different amounts, or values
    that are not positive.
    """
    size = np.asarray(amounts, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    if size.shape != time.shape or len(np.unique(size)) < 2:
        raise BadInput(
            f"cannot fit an efficiency to {size.size} amounts and {time.size} times; needed are "
            "equal numbers of both and at least two different amounts; measure more sizes"
        )
    if not (np.all(size > 0) and np.all(time > 0) and np.all(np.isfinite(size + time))):
        raise BadInput(
            "cannot fit an efficiency to amounts or times that are not positive numbers; remove "
            "those measurements"
        )
    best = min(_candidates(size, time, peak), key=lambda c: _squared_error(c, size, time, peak))
    errors = np.abs(_seconds(best, size, peak) / time - 1)
    return EfficiencyFit(best, float(errors.mean()), float(errors.max()), len(size))


def _candidates(size: np.ndarray, time: np.ndarray, peak: float) -> list[EfficiencyCurve]:
    """The unconstrained optimum if it is valid, and the optima on both boundaries."""
    rows = np.stack([1 / time, size / time], axis=1)
    overhead, slope = np.linalg.lstsq(rows, np.ones(len(size)), rcond=None)[0]
    curves = []
    if overhead >= 0 and slope * peak >= 1:
        curves.append(EfficiencyCurve(float(1 / (slope * peak)), float(overhead)))
    relative_size = size / time
    slope_without_overhead = float(relative_size.sum() / (relative_size**2).sum())
    curves.append(EfficiencyCurve(min(1.0, 1 / (slope_without_overhead * peak))))
    inverse_time = 1 / time
    rest = 1 - relative_size / peak
    overhead_at_peak = float((inverse_time * rest).sum() / (inverse_time**2).sum())
    curves.append(EfficiencyCurve(1.0, max(0.0, overhead_at_peak)))
    return curves


def _seconds(curve: EfficiencyCurve, size: np.ndarray, peak: float) -> np.ndarray:
    return curve.overhead + size / (curve.share * peak)


def _squared_error(
    curve: EfficiencyCurve, size: np.ndarray, time: np.ndarray, peak: float
) -> float:
    return float(((_seconds(curve, size, peak) / time - 1) ** 2).sum())
