"""Statistics of the cost model's benchmark: rank agreement, regret, and the ablation.

For each kernel: Kendall's tau-b between modelled and measured times, and the *regret*, the measured
time of the modelled best plan / the best measured time - 1.  A ratio of the ablation is a variant's
time / the time of the explorer's partition with tuned plans; above 1 the full compiler is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, mean, median
from typing import Any

import numpy as np

from benchmarks.harness.rank_agreement import kendall

FULL = "explorer, raced"
"""The variant with all parts of the compiler: the explorer's partition with tuned plans."""

Row = Mapping[str, Any]


def summarize(chains: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics over all measured kernels and chains, as the result file stores them."""
    kernels = [kernel for chain in chains.values() for kernel in chain["kernels"]]
    kernels = [kernel for kernel in kernels if len(measured_plans(kernel)) >= 2]
    taus = [tau for kernel in kernels if (tau := kernel_tau(kernel)) is not None]
    all_rows = [row for kernel in kernels for row in measured_plans(kernel)]
    all_records = [row for c in chains.values() for k in c["kernels"] for row in k["plans"]]
    return {
        "chains": len(chains),
        "kernels": len(kernels),
        "plans": len(all_rows),
        "plans_that_did_not_run": sum("error" in row for row in all_records),
        "wrong": sum(bool(row.get("wrong")) for row in all_records),
        "tau": distribution(taus),
        "regret": distribution([regret(kernel, modelled_best(kernel)) for kernel in kernels]),
        "regret_raced": distribution(
            [value for chain in chains.values() if (value := tuned_regret(chain)) is not None]
        ),
        "pooled_tau": pooled_tau(all_rows),
        "ablation": ablation_ratios(chains.values()),
    }


def measured_plans(kernel: Row) -> list[Row]:
    """Records of the plans that were measured."""
    return [row for row in kernel["plans"] if row.get("samples_us")]


def median_us(row: Row) -> float:
    """Median measured microseconds of a plan."""
    return float(median(row["samples_us"]))


def kernel_tau(kernel: Row) -> float | None:
    """Kendall's tau-b between the modelled and measured times of a kernel's plans."""
    rows = measured_plans(kernel)
    return kendall(
        np.array([row["modelled_us"] for row in rows]), np.array([*map(median_us, rows)])
    )


def modelled_best(kernel: Row) -> str:
    """The modelled best of the measured plans; plans that are a last choice only without others."""

    def rank(row: Row) -> tuple[bool, float, str]:
        return bool(row.get("last")), row["modelled_us"], row["plan"]

    best = min(measured_plans(kernel), key=rank)
    return str(best["plan"])


def regret(kernel: Row, plan: str) -> float:
    """Measured time of this plan / that of the fastest plan - 1."""
    times = {row["plan"]: median_us(row) for row in measured_plans(kernel)}
    return times[plan] / min(times.values()) - 1


def tuned_regret(chain: Row) -> float | None:
    """Regret of the plan that tuning chose during the measurement, for a chain of one kernel.

    None for other chains.  ``tuning_replay`` has the choice of the present autotuner.
    """
    plans = chain["ablation"]["variants"][FULL]["plans"]
    if len(chain["kernels"]) != 1 or len(plans) != 1:
        return None
    (kernel,) = chain["kernels"]
    return (
        regret(kernel, plans[0])
        if any(row["plan"] == plans[0] for row in measured_plans(kernel))
        else None
    )


def pooled_tau(rows: Sequence[Row]) -> float | None:
    """Tau over the plans of all kernels together."""
    tau = kendall(np.array([row["modelled_us"] for row in rows]), np.array([*map(median_us, rows)]))
    return None if tau is None else round(tau, 3)


def ablation_ratios(chains: Sequence[Row] | Any) -> dict[str, Any]:
    """Ratios of every variant but the full one, and the number of chains with other kernels."""
    result: dict[str, Any] = {}
    ratios_by_chain = [variant_ratios(chain["ablation"]) for chain in chains]
    for name in dict.fromkeys(name for chain_ratios in ratios_by_chain for name in chain_ratios):
        values = [chain_ratios[name] for chain_ratios in ratios_by_chain if name in chain_ratios]
        result[name] = {
            "mean": round(geometric_mean(values), 4),
            "least": round(min(values), 4),
            "most": round(max(values), 4),
            "other_kernels": sum(value != 1.0 for value in values),
        }
    return result


def variant_ratios(measured: Row) -> dict[str, float]:
    """Time of each variant / that of the full one; exactly 1 if they have the same kernels."""
    variants, samples = measured["variants"], measured["samples_us"]
    full = variants[FULL]["as"]
    return {
        name: float(
            median(a / b for a, b in zip(samples[variant["as"]], samples[full], strict=True))
        )
        for name, variant in variants.items()
        if name != FULL
    }


def distribution(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median, least and largest value; all None without values."""
    if not values:
        return {"mean": None, "median": None, "least": None, "most": None}
    statistics = mean(values), median(values), min(values), max(values)
    names = ("mean", "median", "least", "most")
    return dict(zip(names, (round(number, 4) for number in statistics), strict=True))
