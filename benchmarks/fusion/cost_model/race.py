"""Races between plans of a kernel, played back: what they would have taken of plans that were
measured side by side.

Candidates that nobody measured do not take part; they might be faster than all that are known.  The
first choice has one row of samples, which is its own null here, and no second one to confirm what
won: a race on a GPU keeps the first choice more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.fusion.cost_model.summary import spread
from nostall.fusion.codegen.autotune.candidates import fastest_measured, fastest_modelled
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan

MOST = (1, 2, 4, 5, 6, 8, 10)
"""How many of the modelled best plans race."""

Row = Mapping[str, Any]


def races(
    times: Mapping[KernelPlan, float], samples: Mapping[KernelPlan, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """By the number of the modelled best plans: how many candidates there are of all with modelled
    ``times``, how many of them have no ``samples``, the plan that wins, and its regret."""
    best = min(map(median, samples.values()))
    found = {}
    for most in MOST:
        every = fastest_modelled(times, most)
        known = [plan for plan in every if plan in samples]
        if not known:
            continue
        rows = [samples[plan] for plan in known]
        winner = known[fastest_measured([*rows, rows[0]], "measured")]
        found[str(most)] = {
            "candidates": len(every),
            "unknown": len(every) - len(known),
            "winner": str(winner),
            "regret": round(median(samples[winner]) / best - 1, 4),
        }
    return found


def means(rows: Sequence[Mapping[str, Row]]) -> dict[str, dict[str, Any]]:
    """Over all kernels: candidates, those without samples, and regret, by the number of the
    modelled best plans."""
    found = {}
    for most in map(str, MOST):
        of_most = [row[most] for row in rows if most in row]
        found[most] = {
            key: spread([race[key] for race in of_most])
            for key in ("candidates", "unknown", "regret")
        }
    return found
