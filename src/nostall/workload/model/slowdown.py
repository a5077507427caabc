"""Model of the slow-down of data-parallel steps over several nodes, fitted to measured steps.

An extension of nostall: arXiv:1910.05930 adds T_compute and T_weights at a flat efficiency.
Measured steps need two more numbers: an overhead that each exchange costs whatever its size, and
the share of the computation that hides communication.  Nothing hides the gradients that remain
after the last full bucket, because the backward pass has ended.  The step time is

    T = T_c + max(last, overhead + bytes / (share x peak) - hidden x T_c)

``last`` is the time of one bucket, or of all gradients if they are smaller.  The bucket size is an
option of the training program (25 MiB in PyTorch's DistributedDataParallel) and is not fitted.  T_c
is the step time on one node with as many GPUs as the fullest node has, so slow-down by sharing
input, memory and PCIe within a node is measured, not modelled.  With two nodes, both directions of
the ring use the link of one pair; such steps have a share of the peak of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import EfficiencyCurve

BUCKET_BYTES = 25 * 2**20
"""Default size of a bucket of PyTorch's DistributedDataParallel."""
_GRID_POINTS = (33, 41, 11)
"""Grid points of overhead, share and hidden.  The overhead has a cubic scale and the share a
logarithmic one, for a fine resolution of small values."""
_ZOOMS = 4
"""Grid searches; each one covers the neighbours of the best point of the one before."""
_PAIR_SHARES = np.exp(np.linspace(np.log(0.1), 0.0, 93))
"""Candidates for ``pair_share``, in steps of 2.5 %."""
MIN_GROUPS = 3
"""Groups that are needed to evaluate each group with a fit to the others."""
_QUANTILES = np.linspace(0.0025, 0.9975, 200)
"""Quantiles that represent each group in ``spread``, so that all groups have the same weight."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step on several nodes."""

    group: str
    """Name of the model.  All groups have the same weight in a fit."""
    compute: float
    """Measured seconds of the same work on one node."""
    moved_bytes: float
    """Bytes that a rank exchanges."""
    seconds: float
    """Measured seconds of the step."""
    last_share: float = 0.0
    """Share of the bytes that computation cannot hide (see :func:`last_bucket_share`)."""
    is_pair: bool = False
    """Whether there are exactly two nodes."""


@dataclass(frozen=True, slots=True)
class SlowdownModel:
    """A fitted slow-down model."""

    curve: EfficiencyCurve
    """Efficiency of the network."""
    hidden_share: float
    """Share of the computation that hides communication."""
    peak: float
    """Peak rate of the network in bytes/s."""
    pair_share: float = 1.0
    """Factor of the share of the curve if there are two nodes."""
    spread: tuple[float, ...] = ()
    """Ratios of measured to modelled step times, for intervals."""

    def seconds(self, step: MeasuredStep) -> float:
        """Modelled seconds of a step; the measured ``step.seconds`` is not used."""
        peak = self.peak * (self.pair_share if step.is_pair else 1.0)
        exposed = self.curve.seconds(step.moved_bytes, peak) - self.hidden_share * step.compute
        last_bucket = self.curve.seconds(step.last_share * step.moved_bytes, peak)
        return step.compute + max(last_bucket, exposed)

    def interval(self, step: MeasuredStep, share: float = 0.9) -> tuple[float, float]:
        """Interval of the step time that contains ``share`` of the ratios in ``spread``."""
        if not self.spread:
            raise BadInput("the model has no spread, so no interval; make it with fit_slowdown")
        low, high = np.quantile(self.spread, [(1 - share) / 2, (1 + share) / 2])
        seconds = self.seconds(step)
        return seconds * float(low), seconds * float(high)


def last_bucket_share(gradient_bytes: float, bucket_bytes: float) -> float:
    """Share of the gradients that is exchanged after the backward pass has ended."""
    return min(1.0, bucket_bytes / gradient_bytes) if gradient_bytes > 0 else 0.0


def fit_slowdown(steps: Sequence[MeasuredStep], peak: float) -> SlowdownModel:
    """Fit overhead, share, hidden share and pair share; the loss is the mean absolute log error.

    ``spread`` is meant for a group that is not in the fit.  With :data:`MIN_GROUPS` groups or more,
    it has the ratios of each group under a fit to the other groups.  With fewer groups a fit to the
    others says little, so it has the ratios under the fit itself.  Raises
    :class:`~nostall.core.errors.BadInput` for fewer than two different numbers of bytes.
    """
    model = _fit_without_spread(steps, peak)
    groups = list(dict.fromkeys(step.group for step in steps))
    spread: list[float] = []
    for group in groups:
        held_out = [step for step in steps if step.group == group]
        others = [step for step in steps if step.group != group]
        judge = _fit_without_spread(others, peak) if len(groups) >= MIN_GROUPS else model
        ratios = [step.seconds / judge.seconds(step) for step in held_out]
        spread.extend(np.quantile(ratios, _QUANTILES).tolist())
    return replace(model, spread=tuple(spread))


def _fit_without_spread(steps: Sequence[MeasuredStep], peak: float) -> SlowdownModel:
    """Fit steps on three or more nodes first, then ``pair_share`` to the steps on two nodes."""
    pairs = [step for step in steps if step.is_pair]
    others = [step for step in steps if not step.is_pair]
    has_sizes = len({step.moved_bytes for step in others}) > 1
    model = _fit_curve_and_overlap(others if has_sizes else steps, peak)
    if not pairs or not others:
        return model
    candidates = [replace(model, pair_share=float(share)) for share in _PAIR_SHARES]
    return min(candidates, key=lambda candidate: _loss(candidate, pairs))


def _loss(model: SlowdownModel, steps: Sequence[MeasuredStep]) -> float:
    group_size = Counter(step.group for step in steps)
    return sum(
        abs(math.log(model.seconds(step) / step.seconds)) / group_size[step.group] for step in steps
    )


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """Measured steps as arrays of shape [steps]."""

    compute: np.ndarray
    link: np.ndarray
    """Seconds of the bytes at the peak rate."""
    last_share: np.ndarray
    seconds: np.ndarray
    weight: np.ndarray
    """1 over the size of the group."""


def _fit_curve_and_overlap(steps: Sequence[MeasuredStep], peak: float) -> SlowdownModel:
    """Grid search that zooms in: deterministic, and the loss has no gradient at its kinks."""
    if len({step.moved_bytes for step in steps}) < 2:
        raise BadInput(
            f"cannot fit a slow-down: {len(steps)} steps have fewer than two different amounts of "
            "bytes; measure more models or numbers of nodes"
        )
    group_size = Counter(step.group for step in steps)
    arrays = _StepArrays(
        compute=np.array([step.compute for step in steps]),
        link=np.array([step.moved_bytes for step in steps]) / peak,
        last_share=np.array([step.last_share for step in steps]),
        seconds=np.array([step.seconds for step in steps]),
        weight=np.array([1 / group_size[step.group] for step in steps]),
    )
    low = np.array([0.0, np.log(1e-3), 0.0])
    high = np.array([float(np.cbrt(np.median(arrays.seconds))), 0.0, 1.0])
    floor, ceiling = low, high
    best = low
    for _ in range(_ZOOMS):
        axes = [np.linspace(a, b, n) for a, b, n in zip(low, high, _GRID_POINTS, strict=True)]
        best = _best_grid_point(axes, arrays)
        reach = 1.5 * np.array([axis[1] - axis[0] for axis in axes])
        low, high = np.maximum(best - reach, floor), np.minimum(best + reach, ceiling)
    overhead_root, log_share, hidden_share = best
    curve = EfficiencyCurve(float(np.exp(log_share)), float(overhead_root**3))
    return SlowdownModel(curve, float(hidden_share), peak)


def _best_grid_point(axes: list[np.ndarray], steps: _StepArrays) -> np.ndarray:
    """(cube root of overhead, log share, hidden share) with the smallest weighted error."""
    best, min_error = np.zeros(3), np.inf
    for log_share in axes[1]:
        for hidden_share in axes[2]:
            overhead, link = axes[0][:, None] ** 3, steps.link * np.exp(-log_share)
            last_bucket = np.where(steps.last_share > 0, overhead + steps.last_share * link, 0.0)
            exposed = np.maximum(last_bucket, overhead + link - hidden_share * steps.compute)
            errors = np.abs(np.log((steps.compute + exposed) / steps.seconds)) @ steps.weight
            i = int(np.argmin(errors))
            if errors[i] < min_error:
                min_error = float(errors[i])
                best = np.array([axes[0][i], log_share, hidden_share])
    return best
