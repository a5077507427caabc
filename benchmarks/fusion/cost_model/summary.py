"""What the measured plans say of the model: order, regret, and what each part is worth.

Of a kernel: Kendall's tau-b between modelled and measured times, and the *regret*, measured time of
the modelled best plan / best measured time - 1.  Ratios of the ablation are another variant's time
/ that of the explorer's partition with raced plans, so above 1 the whole compiler is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, mean, median
from typing import Any

import numpy as np

from benchmarks.harness.rank_agreement import kendall

FULL = "explorer, raced"
"""All parts of the compiler."""

Row = Mapping[str, Any]


def summary(chains: Mapping[str, Any]) -> dict[str, Any]:
    """Over all kernels and chains that were measured."""
    kernels = [kernel for chain in chains.values() for kernel in chain["kernels"]]
    kernels = [kernel for kernel in kernels if len(ran(kernel)) >= 2]
    taus = [tau for kernel in kernels if (tau := tau_of(kernel)) is not None]
    every = [row for kernel in kernels for row in ran(kernel)]
    missing = [row for c in chains.values() for k in c["kernels"] for row in k["plans"]]
    return {
        "chains": len(chains),
        "kernels": len(kernels),
        "plans": len(every),
        "plans_that_did_not_run": sum("error" in row for row in missing),
        "wrong": sum(bool(row.get("wrong")) for row in missing),
        "tau": spread(taus),
        "regret": spread([regret(kernel, first(kernel)) for kernel in kernels]),
        "regret_raced": spread(
            [r for chain in chains.values() if (r := raced_regret(chain)) is not None]
        ),
        "pooled_tau": pooled(every),
        "ablation": ablation(chains.values()),
    }


def ran(kernel: Row) -> list[Row]:
    """The plans with a time."""
    return [row for row in kernel["plans"] if row.get("samples_us")]


def us(row: Row) -> float:
    return float(median(row["samples_us"]))


def tau_of(kernel: Row) -> float | None:
    rows = ran(kernel)
    return kendall(np.array([row["modelled_us"] for row in rows]), np.array([*map(us, rows)]))


def first(kernel: Row) -> str:
    """The plan that the model likes best of those that ran."""
    best = min(ran(kernel), key=lambda row: (row["modelled_us"], row["plan"]))
    return str(best["plan"])


def regret(kernel: Row, plan: str) -> float:
    """What this plan takes beyond the fastest one, as a share."""
    times = {row["plan"]: us(row) for row in ran(kernel)}
    return times[plan] / min(times.values()) - 1


def raced_regret(chain: Row) -> float | None:
    """The regret of the plan that was raced then, of a chain that is one kernel.  What today's race
    would take of the same plans says ``fusion_evaluator_race``."""
    taken = chain["ablation"]["variants"][FULL]["plans"]
    if len(chain["kernels"]) != 1 or len(taken) != 1:
        return None
    (kernel,) = chain["kernels"]
    return regret(kernel, taken[0]) if any(r["plan"] == taken[0] for r in ran(kernel)) else None


def pooled(rows: Sequence[Row]) -> float | None:
    """Tau over the plans of all kernels at once."""
    tau = kendall(np.array([row["modelled_us"] for row in rows]), np.array([*map(us, rows)]))
    return None if tau is None else round(tau, 3)


def ablation(chains: Sequence[Row] | Any) -> dict[str, Any]:
    """Of every variant but the full one: its ratios, and how many chains have other kernels."""
    found: dict[str, Any] = {}
    told = [ratios(chain["ablation"]) for chain in chains]
    for name in dict.fromkeys(name for one in told for name in one):
        values = [one[name] for one in told if name in one]
        found[name] = {
            "mean": round(geometric_mean(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
            "other_kernels": sum(value != 1.0 for value in values),
        }
    return found


def ratios(measured: Row) -> dict[str, float]:
    """Time of each variant / that of the full one; 1 exactly where they have the same kernels."""
    variants, samples = measured["variants"], measured["samples_us"]
    full = variants[FULL]["as"]
    return {
        name: float(median(a / b for a, b in zip(samples[v["as"]], samples[full], strict=True)))
        for name, v in variants.items()
        if name != FULL
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median and the extremes."""
    if not values:
        return {"mean": None, "median": None, "least": None, "most": None}
    numbers = mean(values), median(values), min(values), max(values)
    names = ("mean", "median", "least", "most")
    return dict(zip(names, (round(n, 4) for n in numbers), strict=True))
