"""Replay of autotuning from recorded samples: which plan it would have chosen.

Candidates without samples are left out; they might be faster than all measured plans.  The modelled
best plan has one row of samples, which is also its null, and the winner is not measured a second
time.  Autotuning on a GPU therefore keeps the modelled best plan more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.fusion.cost_model.summary import distribution
from nostall.fusion.codegen.autotune.candidates import fastest_measured, fastest_modelled
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan

CANDIDATE_LIMITS = (1, 2, 4, 5, 6, 8, 10)
"""Numbers of modelled best plans for which tuning is replayed."""

Row = Mapping[str, Any]


def replay_tuning(
    times: Mapping[KernelPlan, float], samples: Mapping[KernelPlan, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Replay tuning for each of :data:`CANDIDATE_LIMITS`.

    ``times``: modelled seconds of all legal plans; ``samples``: measured times.  Each result has
    the numbers of candidates and of those without samples, the winner and its regret.
    """
    best = min(map(median, samples.values()))
    results = {}
    for limit in CANDIDATE_LIMITS:
        plans = fastest_modelled(times, limit)
        measured_plans = [plan for plan in plans if plan in samples]
        if not measured_plans:
            continue
        rows = [samples[plan] for plan in measured_plans]
        winner = measured_plans[fastest_measured([*rows, rows[0]], "measured")]
        results[str(limit)] = {
            "candidates": len(plans),
            "unknown": len(plans) - len(measured_plans),
            "winner": str(winner),
            "regret": round(median(samples[winner]) / best - 1, 4),
        }
    return results


def replay_distributions(rows: Sequence[Mapping[str, Row]]) -> dict[str, dict[str, Any]]:
    """Distributions over all kernels of candidates, unmeasured candidates and regret, by limit."""
    results = {}
    for limit in map(str, CANDIDATE_LIMITS):
        replays = [row[limit] for row in rows if limit in row]
        results[limit] = {
            key: distribution([replay[key] for replay in replays])
            for key in ("candidates", "unknown", "regret")
        }
    return results
