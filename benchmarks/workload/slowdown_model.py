"""Slow-down of data-parallel steps, fitted to measured ones; ours, not the paper's.

The published model adds T_compute and T_weight at a flat efficiency.  Measured steps need two more
numbers: an overhead each exchange pays whatever its size, and how much of the computation hides
communication.  What is left of gradients after the whole buckets have gone can hide behind nothing:
its backward pass has ended.  So

    T = T_c + max(last, overhead + bytes / (share x peak) - hidden x T_c)

with ``last`` the time of one bucket, or of everything where that is less.  The bucket is a setting
of the training program (25 MiB in PyTorch's DistributedDataParallel), not fitted.  T_c is the step
on one machine with as many GPUs as the fullest has, so that what GPUs of a machine take from each
other (input, memory, PCIe) is measured, not modelled.  Between two machines all of a ring's
traffic, both directions, runs between one pair; such steps get a share of the peak of their own.
"""

from __future__ import annotations

import math
from collections import Counter
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
_PAIR_SHARES = np.exp(np.linspace(np.log(0.1), 0.0, 93))
"""In steps of 2.5 %."""
ENOUGH_GROUPS = 3
_QUANTILES = np.linspace(0.0025, 0.9975, 200)
"""As many per group, so that each has the same weight in an interval."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step on several machines, its length, the same work on one of them, the bytes exchanged.

    ``last`` is the share of these bytes that computation cannot hide (see :func:`last_share`),
    ``pair`` whether there are two machines only.  ``group`` (a model's name) has the same weight in
    a fit however many steps it has.
    """

    group: str
    compute: float
    moved: float
    seconds: float
    last: float = 0.0
    pair: bool = False

    @property
    def slowdown(self) -> float:
        return self.seconds / self.compute


@dataclass(frozen=True, slots=True)
class SlowdownFit:
    """The fitted link and what it leaves.

    ``spread`` holds measured over modelled of the steps it was judged by.  Between two machines the
    curve's share is ``pair_share`` times as large.
    """

    curve: Curve
    hidden: float
    peak: float
    pair_share: float = 1.0
    spread: tuple[float, ...] = ()

    def seconds(self, compute: float, moved: float, last: float = 0.0, pair: bool = False) -> float:
        """Modelled length of a step; ``last`` and ``pair`` as in :class:`MeasuredStep`."""
        peak = self.peak * (self.pair_share if pair else 1.0)
        exposed = self.curve.seconds(moved, peak) - self.hidden * compute
        return compute + max(self.curve.seconds(last * moved, peak), exposed)

    def interval(
        self,
        compute: float,
        moved: float,
        last: float = 0.0,
        pair: bool = False,
        share: float = 0.9,
    ) -> tuple[float, float]:
        """Bounds that hold ``share`` of the steps in ``spread`` (measured over modelled)."""
        if not self.spread:
            raise BadInput("the fit has no spread, so no interval; make it with fit_slowdown")
        low, high = np.quantile(self.spread, [(1 - share) / 2, (1 + share) / 2])
        middle = self.seconds(compute, moved, last, pair)
        return middle * float(low), middle * float(high)


def last_share(gradients: float, bucket: float) -> float:
    """Share of ``gradients`` bytes that is exchanged when the backward pass has ended."""
    return min(1.0, bucket / gradients) if gradients > 0 else 0.0


def fit_slowdown(steps: Sequence[MeasuredStep], peak: float) -> SlowdownFit:
    """Fit overhead, share, hidden part and the pair's share, groups weighted alike.

    The loss is the mean absolute log error.  ``spread`` is for a group that nobody fitted: with
    :data:`ENOUGH_GROUPS` or more each group is judged by a fit on the others, with fewer (whose
    errors among each other say little) by the fit itself.  Raises
    :class:`~nostall.core.errors.BadInput` without two different amounts.
    """
    fit = _fitted(steps, peak)
    names = list(dict.fromkeys(s.group for s in steps))
    spread: list[float] = []
    for name in names:
        own = [s for s in steps if s.group == name]
        others = [s for s in steps if s.group != name]
        judge = _fitted(others, peak) if len(names) >= ENOUGH_GROUPS else fit
        left = [s.seconds / judge.seconds(s.compute, s.moved, s.last, s.pair) for s in own]
        spread.extend(np.quantile(left, _QUANTILES).tolist())
    return replace(fit, spread=tuple(spread))


def _fitted(steps: Sequence[MeasuredStep], peak: float) -> SlowdownFit:
    """The fit without its spread; the steps of pairs see the rest of it fixed."""
    pairs = [s for s in steps if s.pair]
    more = [s for s in steps if not s.pair]
    fit = _fit(more if len({s.moved for s in more}) > 1 else steps, peak)
    if not pairs or len(more) == 0:
        return fit
    tried = [replace(fit, pair_share=float(x)) for x in _PAIR_SHARES]
    return min(tried, key=lambda one: _loss(one, pairs))


def _loss(fit: SlowdownFit, steps: Sequence[MeasuredStep]) -> float:
    size = Counter(s.group for s in steps)
    return sum(
        abs(math.log(fit.seconds(s.compute, s.moved, s.last, s.pair) / s.seconds)) / size[s.group]
        for s in steps
    )


def _fit(steps: Sequence[MeasuredStep], peak: float) -> SlowdownFit:
    """A grid that zooms in: three parameters with kinks need no gradient, and the result is the
    same bit for bit."""
    if len({s.moved for s in steps}) < 2:
        raise BadInput(f"{len(steps)} steps move fewer than two different amounts; measure more")
    compute = np.array([s.compute for s in steps])
    ideal = np.array([s.moved for s in steps]) / peak
    last = np.array([s.last for s in steps])
    seconds = np.array([s.seconds for s in steps])
    size = Counter(s.group for s in steps)
    weight = np.array([1 / size[s.group] for s in steps])
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
    return SlowdownFit(Curve(float(np.exp(share)), float(overhead**3)), float(hidden), peak)


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
