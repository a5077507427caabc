"""Summary of the records of ``benchmarks.learning.strategies`` by kernel and strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PARTS = (0.5, 0.8, 0.95)
"""Parts of the best known gain for which evaluations are counted; the last is the target."""


def reached(curve: Sequence[Sequence[float]], ratio: float) -> int | None:
    """Evaluations until the curve reaches ``ratio``; None if it never does or ``ratio`` <= 1."""
    return next((int(at) for at, value in curve if value >= ratio > 1.0), None)


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each kernel and strategy: gains, evaluations to parts of the best gain, cost.

    ``evaluations_to`` has one number for each part and seed, None if the seed never reaches it;
    ``curve`` has the quartiles over the seeds; the best gain is that of any strategy and seed.
    """
    rows = []
    for kernel in sorted({r["kernel"] for r in records}):
        mine = [r for r in records if r["kernel"] == kernel]
        best = max(r["ratio"] for r in mine)
        for strategy in sorted({r["strategy"] for r in mine}):
            runs = sorted((r for r in mine if r["strategy"] == strategy), key=lambda r: r["seed"])
            ratios = [r["ratio"] for r in runs]
            rows.append(
                {
                    "kernel": kernel,
                    "strategy": strategy,
                    "seeds": len(runs),
                    "median_ratio": float(np.median(ratios)),
                    "low": min(ratios),
                    "high": max(ratios),
                    "best_known": best,
                    "evaluations_to": {
                        str(part): [reached(r["curve"], 1.0 + part * (best - 1.0)) for r in runs]
                        for part in PARTS
                    },
                    "processor_s": float(np.median([r["processor_s"] for r in runs])),
                    "curve": quartiles([r["curve"] for r in runs]),
                }
            )
    return rows


def quartiles(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """[evaluations, lower quartile, median, upper quartile] at each point where a curve rises."""
    rows = []
    for at in sorted({int(n) for curve in curves for n, _ in curve}):
        values = [max(v for n, v in curve if n <= at) for curve in curves]
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        rows.append([at, *(round(float(x), 6) for x in (low, median, high))])
    return rows
