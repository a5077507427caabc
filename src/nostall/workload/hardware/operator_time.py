"""Time model of an operator: a fixed cost per call, plus its FLOP and its bytes at fitted rates.

A flat share of a peak rate fits neither a small kernel nor a batch norm that reads its input twice.
Three numbers per kind of operator are fitted to measured calls:

    seconds = calls x overhead + compute x FLOP / peak FLOP/s + memory x bytes / peak bytes/s

The efficiency therefore rises with the size.  The model is a sum, not the maximum of a roofline:
what-if questions need a time that is linear in both inverse rates, and near the ridge point compute
and memory access do not overlap completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.jobs.record import Operator

MAX_FACTOR = 1e9
"""Limit of the three numbers of a time model."""


@dataclass(frozen=True, slots=True)
class OperatorTimeModel:
    """Fitted time model of one kind of operator.

    A factor of 1 means the peak rate; a factor of 0 means that the amount does not matter.
    """

    overhead: float
    """Seconds per call."""
    compute: float
    """Factor of the time of the FLOP at the peak rate."""
    memory: float
    """Factor of the time of the bytes at the peak rate; below 1 if caches serve some of them."""

    def __post_init__(self) -> None:
        values = (self.overhead, self.compute, self.memory)
        if not all(0 <= v <= MAX_FACTOR for v in values) or not any(values):
            raise BadInput(
                f"an operator has overhead {self.overhead!r} s, compute {self.compute!r} and "
                f"memory {self.memory!r}; allowed are numbers from 0 to {MAX_FACTOR:g}, not all 0; "
                "correct them"
            )

    def seconds(self, operator: Operator, peak_flops: float, peak_memory: float) -> float:
        """Modelled time of all calls of ``operator``; the peaks are in FLOP/s and bytes/s."""
        fixed = self.overhead * operator.calls
        work = self.compute * operator.flops / peak_flops
        return fixed + work + self.memory * operator.bytes_moved / peak_memory


@dataclass(frozen=True, slots=True)
class OperatorTimeFit:
    """A time model fitted to measured calls, and its relative errors on them."""

    time_model: OperatorTimeModel
    mean_error: float
    worst_error: float
    points: int
    """Number of measurements."""


def fit_operator_time(
    operators: Sequence[Operator], seconds: Sequence[float], peak_flops: float, peak_memory: float
) -> OperatorTimeFit:
    """Fit the time model of one operator kind by relative least squares with factors >= 0.

    Errors are relative because sizes span decades.  The optimum with factors >= 0 is the
    unconstrained optimum of a subset of the factors, so all seven subsets are tried.  Raises
    :class:`~nostall.core.errors.BadInput` for fewer than two different operators, or times that are
    not positive.
    """
    time = np.asarray(seconds, dtype=np.float64)
    rows = np.array(
        [[o.calls, o.flops / peak_flops, o.bytes_moved / peak_memory] for o in operators],
        dtype=np.float64,
    ).reshape(-1, 3)
    if len(rows) != len(time) or len(np.unique(rows, axis=0)) < 2:
        raise BadInput(
            f"cannot fit a time model to {len(rows)} operators and {len(time)} times; needed are "
            "equal numbers of both and at least two different operators; measure more sizes"
        )
    if not (np.all(time > 0) and np.all(np.isfinite(time))):
        raise BadInput(
            "cannot fit a time model to times that are not positive numbers; remove those "
            "measurements"
        )
    relative = rows / time[:, None]
    best = min(_candidates(relative), key=lambda c: float(((relative @ c - 1) ** 2).sum()))
    errors = np.abs(relative @ best - 1)
    time_model = OperatorTimeModel(*(float(v) for v in best))
    return OperatorTimeFit(time_model, float(errors.mean()), float(errors.max()), len(time))


def _candidates(relative: np.ndarray) -> list[np.ndarray]:
    """The unconstrained optimum of each subset of factors, if all of its factors are >= 0."""
    used = [column for column in range(3) if relative[:, column].any()]
    candidates = []
    for count in range(1, len(used) + 1):
        for subset in map(list, combinations(used, count)):
            values = np.linalg.lstsq(relative[:, subset], np.ones(len(relative)), rcond=None)[0]
            if (values >= 0).all():
                factors = np.zeros(3)
                factors[subset] = values
                candidates.append(factors)
    return candidates
