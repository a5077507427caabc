"""How long an operator takes on a GPU: a fixed cost and its FLOP and bytes, each times a factor.

A flat share of a peak fits neither a small kernel nor a batch norm that reads its input twice.  Per
kind of operator three numbers are fitted to measured calls:

    seconds = calls x overhead + compute x flops / peak FLOP/s + memory x bytes / peak bytes/s

so that the efficiency rises with size.  A sum, not the maximum of a roofline: it is linear in both
rates, as the what-ifs assume, and near the ridge neither hides behind the other completely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.jobs.operators import Operator


@dataclass(frozen=True, slots=True)
class OperatorCurve:
    """Factors of one kind of operator; 1 would be the peak, 0 says that the amount does not matter.

    A factor of bytes may be below 1: what the caches hold is faster than memory.
    """

    overhead: float
    compute: float
    memory: float

    def __post_init__(self) -> None:
        values = (self.overhead, self.compute, self.memory)
        if not all(isfinite(v) and v >= 0 for v in values) or not any(values):
            raise BadInput(
                f"an operator curve has overhead {self.overhead!r} s, compute {self.compute!r} and "
                f"memory {self.memory!r}; allowed are numbers >= 0, not all 0, so correct them"
            )

    def seconds(self, operator: Operator, peak_flops: float, peak_memory: float) -> float:
        """Time of all calls of ``operator`` at these peaks per second."""
        fixed = self.overhead * operator.calls
        work = self.compute * operator.flops / peak_flops
        return fixed + work + self.memory * operator.size / peak_memory


@dataclass(frozen=True, slots=True)
class OperatorFit:
    """A curve and the relative errors it leaves on what it was fitted to."""

    curve: OperatorCurve
    mean_error: float
    worst_error: float
    points: int


def fit_operator(
    operators: Sequence[Operator], seconds: Sequence[float], peak_flops: float, peak_memory: float
) -> OperatorFit:
    """Fit one kind's curve to measured calls by relative least squares with factors >= 0.

    Relative, because sizes span decades.  The best factors under the bound are the free optimum of
    some subset of them, so all seven subsets are tried.  Raises
    :class:`~nostall.core.errors.BadInput` for fewer than two different operators or times that are
    not positive.
    """
    time = np.asarray(seconds, dtype=np.float64)
    rows = np.array(
        [[o.calls, o.flops / peak_flops, o.size / peak_memory] for o in operators], dtype=np.float64
    ).reshape(-1, 3)
    if len(rows) != len(time) or len(np.unique(rows, axis=0)) < 2:
        raise BadInput(
            f"a fit got {len(rows)} operators and {len(time)} times; needed are as many of one as "
            "of the other and at least two different operators, so measure more sizes"
        )
    if not (np.all(time > 0) and np.all(np.isfinite(time))):
        raise BadInput("a fit got times that are not positive numbers; leave them out")
    relative = rows / time[:, None]
    best = min(_candidates(relative), key=lambda c: float(((relative @ c - 1) ** 2).sum()))
    errors = np.abs(relative @ best - 1)
    curve = OperatorCurve(*(float(v) for v in best))
    return OperatorFit(curve, float(errors.mean()), float(errors.max()), len(time))


def _candidates(relative: np.ndarray) -> list[np.ndarray]:
    """The free optimum of each subset of factors, where all of it is >= 0."""
    used = [at for at in range(3) if relative[:, at].any()]
    found = []
    for count in range(1, len(used) + 1):
        for subset in map(list, combinations(used, count)):
            some = np.linalg.lstsq(relative[:, subset], np.ones(len(relative)), rcond=None)[0]
            if (some >= 0).all():
                whole = np.zeros(3)
                whole[subset] = some
                found.append(whole)
    return found
