"""Slow-down of data-parallel steps, fitted to measured ones; ours, not the paper's.

The published model adds T_compute and T_weight at a flat efficiency.  Measured steps need two more
numbers: an overhead each exchange pays whatever its size, and how much of the computation hides
communication.  What is left of gradients after the whole buckets have gone can hide behind nothing:
its backward pass has ended.  So

    T = T_c + max(last, overhead + bytes / (share x peak) - hidden x T_c)

with ``last`` the time of one bucket, or of everything where that is less.  The bucket is a setting
of the training program (25 MiB in PyTorch's DistributedDataParallel), not fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.hardware.efficiency import Curve

_COARSE = (33, 41, 11)
_ROUNDS = 4
"""Grid points of overhead, share and hidden; each round zooms in on the best one's neighbours.
Overheads lie on a cubic scale and shares on a logarithmic one, so that small ones are told apart.
"""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of several replicas: its length, the same work on one GPU, and the bytes exchanged.

    ``last`` is the share of these bytes that computation cannot hide (see :func:`last_share`).
    ``group`` (a model's name) has the same weight in a fit however many steps it has.
    """

    group: str
    compute: float
    moved: float
    seconds: float
    last: float = 0.0

    @property
    def slowdown(self) -> float:
        return self.seconds / self.compute


@dataclass(frozen=True, slots=True)
class SlowdownFit:
    """The fitted link and what it leaves: ``spread`` holds the relative errors it was judged by."""

    curve: Curve
    hidden: float
    peak: float
    spread: tuple[float, ...] = ()

    def seconds(self, compute: float, moved: float, last: float = 0.0) -> float:
        """Modelled length of a step; ``last`` as in :class:`MeasuredStep`."""
        exposed = self.curve.seconds(moved, self.peak) - self.hidden * compute
        return compute + max(self.curve.seconds(last * moved, self.peak), exposed)

    def interval(
        self, compute: float, moved: float, last: float = 0.0, share: float = 0.9
    ) -> tuple[float, float]:
        """Bounds that hold ``share`` of the steps in ``spread`` (measured over modelled)."""
        if not self.spread:
            raise BadInput("the fit has no spread, so no interval; make it with fit_slowdown")
        low, high = np.quantile(self.spread, [(1 - share) / 2, (1 + share) / 2])
        middle = self.seconds(compute, moved, last)
        return middle * float(low), middle * float(high)


def last_share(gradients: float, bucket: float) -> float:
    """Share of ``gradients`` bytes that is exchanged when the backward pass has ended."""
    return min(1.0, bucket / gradients) if gradients > 0 else 0.0


def fit_slowdown(steps: Sequence[MeasuredStep], peak: float) -> SlowdownFit:
    """Fit overhead, share and hidden part by the mean absolute log error, groups weighted alike.

    A grid that zooms in: three parameters with kinks need no gradient, and the result is the same
    bit for bit.  The fit's ``spread`` is measured over modelled of these very steps.  Raises
    :class:`~nostall.core.errors.BadInput` without two different amounts.
    """
    if len({s.moved for s in steps}) < 2:
        raise BadInput(f"{len(steps)} steps move fewer than two different amounts; measure more")
    compute = np.array([s.compute for s in steps])
    ideal = np.array([s.moved for s in steps]) / peak
    last = np.array([s.last for s in steps])
    seconds = np.array([s.seconds for s in steps])
    names = [s.group for s in steps]
    weight = np.array([1 / names.count(n) for n in names])
    low = np.array([0.0, np.log(1e-3), 0.0])
    high = np.array([float(np.cbrt(np.median(seconds))), 0.0, 1.0])
    floor, ceiling = low, high
    best = low
    for _ in range(_ROUNDS):
        axes = [np.linspace(a, b, n) for a, b, n in zip(low, high, _COARSE, strict=True)]
        best = _best(axes, compute, ideal, last, seconds, weight)
        reach = 1.5 * np.array([axis[1] - axis[0] for axis in axes])
        low, high = np.maximum(best - reach, floor), np.minimum(best + reach, ceiling)
    overhead, share, hidden = best
    fit = SlowdownFit(Curve(float(np.exp(share)), float(overhead**3)), float(hidden), peak)
    left = tuple(s.seconds / fit.seconds(s.compute, s.moved, s.last) for s in steps)
    return replace(fit, spread=left)


def _best(
    axes: list[np.ndarray],
    compute: np.ndarray,
    ideal: np.ndarray,
    last: np.ndarray,
    seconds: np.ndarray,
    weight: np.ndarray,
) -> np.ndarray:
    """The grid point with the smallest weighted error."""
    found, least = np.zeros(3), np.inf
    for share in axes[1]:
        for hidden in axes[2]:
            overhead, link = axes[0][:, None] ** 3, ideal * np.exp(-share)
            least_exposed = np.where(last > 0, overhead + last * link, 0.0)
            exposed = np.maximum(least_exposed, overhead + link - hidden * compute)
            wrong = np.abs(np.log((compute + exposed) / seconds)) @ weight
            at = int(np.argmin(wrong))
            if wrong[at] < least:
                least, found = float(wrong[at]), np.array([axes[0][at], share, hidden])
    return found
