"""The record of a comparison of two cubins, with all its samples."""

from __future__ import annotations

from typing import Any

from nostall.tuning.gpu_objective import Decision


def comparison_record(decision: Decision | None) -> dict[str, Any] | None:
    """Ratio, 95 % interval, null and samples in microseconds; None if nothing was timed."""
    if decision is None or decision.comparison is None or decision.outcome.timing is None:
        return None
    comparison, timing = decision.comparison, decision.outcome.timing
    sides = {"original": timing.original, "candidate": timing.candidate, "null": timing.null}
    return {
        "verdict": comparison.verdict,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "null_low": comparison.null_low,
        "null_high": comparison.null_high,
        "loads": timing.loads,
        "us": {side: [round(1e6 * s, 4) for s in samples] for side, samples in sides.items()},
    }
