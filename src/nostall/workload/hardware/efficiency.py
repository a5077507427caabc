"""How much of a peak rate work reaches: a flat share as published, or a fitted curve of size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.jobs.record import Resource

PUBLISHED_SHARE = 0.7
"""The flat efficiency on every resource that readers of arXiv:1910.05930 report (unverified)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds for an amount of work: ``overhead`` + amount / (``share`` x peak).

    The efficiency of an amount ``a`` is share x a / (a + overhead x share x peak): it rises with
    size and reaches half of ``share`` at ``half_size``.  Without overhead it is flat.
    """

    share: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or not 0 <= self.overhead < float("inf"):
            raise BadInput(
                f"an efficiency curve has share {self.share!r} and overhead {self.overhead!r} s; "
                "allowed are 0 < share <= 1 and overhead >= 0, correct the efficiency"
            )

    def seconds(self, amount: float, peak: float) -> float:
        """Time of ``amount`` at ``peak`` per second; nothing to do takes no time."""
        return self.overhead + amount / (self.share * peak) if amount > 0 else 0.0

    def half_size(self, peak: float) -> float:
        """The amount that reaches half of ``share``."""
        return self.overhead * self.share * peak


Efficiency = Mapping[Resource, Curve]


def flat(share: float = PUBLISHED_SHARE) -> Efficiency:
    """The same share of every peak, whatever the size."""
    return {resource: Curve(share) for resource in Resource}


@dataclass(frozen=True, slots=True)
class Fit:
    """A curve fitted to measurements, with the relative errors it leaves on them."""

    curve: Curve
    mean_error: float
    worst_error: float
    points: int


def fit_curve(amounts: Sequence[float], seconds: Sequence[float], peak: float) -> Fit:
    """Fit overhead and share to measured (amount, seconds) pairs by relative least squares.

    Relative, because measurements span decades and their noise grows with them.  Both parameters
    stay physical (overhead >= 0, share <= 1): where the free optimum is not, the best one on the
    boundary is taken.  Raises :class:`~nostall.core.errors.BadInput` for fewer than two distinct
    amounts or values that are not positive.
    """
    size = np.asarray(amounts, dtype=np.float64)
    time = np.asarray(seconds, dtype=np.float64)
    if size.shape != time.shape or len(np.unique(size)) < 2:
        raise BadInput(
            f"a fit got {size.size} amounts and {time.size} times; needed are as many of one as "
            "of the other and at least two different amounts, so measure more sizes"
        )
    if not (np.all(size > 0) and np.all(time > 0) and np.all(np.isfinite(size + time))):
        raise BadInput("a fit got amounts or times that are not positive numbers; leave them out")
    best = min(_candidates(size, time, peak), key=lambda c: _squares(c, size, time, peak))
    errors = np.abs(_seconds(best, size, peak) / time - 1)
    return Fit(best, float(errors.mean()), float(errors.max()), len(size))


def _candidates(size: np.ndarray, time: np.ndarray, peak: float) -> list[Curve]:
    """The free optimum where it is physical, and the optima on both boundaries."""
    rows = np.stack([1 / time, size / time], axis=1)
    overhead, slope = np.linalg.lstsq(rows, np.ones(len(size)), rcond=None)[0]
    found = []
    if overhead >= 0 and slope * peak >= 1:
        found.append(Curve(float(1 / (slope * peak)), float(overhead)))
    relative = size / time
    through_zero = float(relative.sum() / (relative**2).sum())
    found.append(Curve(min(1.0, 1 / (through_zero * peak))))
    inverse = 1 / time
    rest = 1 - relative / peak
    at_peak = float((inverse * rest).sum() / (inverse**2).sum())
    found.append(Curve(1.0, max(0.0, at_peak)))
    return found


def _seconds(curve: Curve, size: np.ndarray, peak: float) -> np.ndarray:
    return curve.overhead + size / (curve.share * peak)


def _squares(curve: Curve, size: np.ndarray, time: np.ndarray, peak: float) -> float:
    return float(((_seconds(curve, size, peak) / time - 1) ** 2).sum())
