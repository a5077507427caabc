"""``docs/results/fusion-cost-model.md``: the cost model of fused kernels beside a GPU.

python -m benchmarks page fusion-cost-model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks.fusion.cost_model.fit import FITTED, MEASURED
from benchmarks.fusion.cost_model.summary import FULL, measured_plans, median_us, variant_ratios
from benchmarks.harness.markdown import PAGES
from benchmarks.harness.rank_agreement import kendall
from benchmarks.harness.result_file import load
from benchmarks.harness.template import render_page
from nostall.attach.torch_compile.options import DEFAULT_TUNED_PLANS
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import MAX_SLOWDOWN

PAGE = PAGES / "fusion-cost-model.md"
TAU, REGRET = 0.7, 0.05
"""Targets: tau at least, regret at most."""
_MODELS = {
    "before": "the earlier model, by which these plans were drawn",
    "today": "the present model",
    "held out": "the present model, fitted to the other half of the chains",
}

Row = Mapping[str, Any]


def text() -> str:
    """The whole page from the committed files."""
    return cost_model_page(load(MEASURED), load(FITTED))


def cost_model_page(measured: Row, judged: Row) -> str:
    """The page. ``measured``: the samples; ``judged``: what the model says of them."""
    chains, summary = measured["chains"], judged["summary"]
    kernels = [
        _kernel(row, chains[row["chain"]]["kernels"][row["number"]]) for row in judged["kernels"]
    ]
    values = {
        "cards": sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains.values()}),
        "date": measured["date"],
        "measured_file": MEASURED,
        "fitted_file": FITTED,
        **_verdict(summary["held out"], measured["summary"], len(kernels)),
        "failed": list(measured["failed"]),
        "models": {name: summary[key] for key, name in _MODELS.items()},
        "kernels": kernels,
        "across": _across(kernels),
        "max_slowdown": MAX_SLOWDOWN,
        "max_candidates": MAX_CANDIDATES,
        "backend_plans": DEFAULT_TUNED_PLANS,
        "races": {
            count: {**race, "held_out": summary["held out"]["races"][count]["regret"]}
            for count, race in summary["today"]["races"].items()
        },
        "full": FULL,
        **_ablation(chains),
    }
    return render_page(__file__, PAGE, values)


def _verdict(held_out: Row, summary: Row, kernels: int) -> Row:
    """Whether the targets are met by coefficients that were not fitted to the kernels judged."""
    return {
        "held_out": held_out,
        "summary": summary,
        "tau_met": held_out["tau"]["mean"] >= TAU,
        "least_tau": TAU,
        "regret_met": held_out["regret"]["mean"] <= REGRET,
        "most_regret": REGRET,
        "wrong": summary["wrong"] or "none",
        "left": summary["kernels"] - kernels,
    }


def _kernel(row: Row, kernel: Row) -> Row:
    """A judged kernel with its measurement."""
    times = {plan["plan"]: median_us(plan) for plan in measured_plans(kernel)}
    best = min(times, key=lambda plan: times[plan])
    return {
        **row,
        "tuned": row["today"]["races"][str(MAX_CANDIDATES)],
        "first_us": times[row["today"]["first"]],
        "best": best,
        "best_us": times[best],
        "modelled_us": kernel["modelled_us"],
    }


def _across(kernels: Sequence[Row]) -> str:
    """How the explorer's evaluators, which do not take kernel plans, order different kernels."""
    best = np.array([kernel["best_us"] for kernel in kernels])
    modelled_us = {
        "delta-evaluator": [kernel["modelled_us"]["delta"] for kernel in kernels],
        "latency-evaluator": [kernel["modelled_us"]["latency"] for kernel in kernels],
        "cost model": [kernel["today"]["first_us"] for kernel in kernels],
    }
    sentences = []
    for name, times in modelled_us.items():
        modelled = np.array(times)
        tau = kendall(modelled, best)
        relative_error = float(np.median(np.abs(modelled / best - 1)))
        sentences.append(f"{name} tau {tau:.2f}, off by {100 * relative_error:.0f} % in the median")
    return "; ".join(sentences)


def _ablation(chains: Mapping[str, Any]) -> Row:
    """Every variant beside the whole compiler, for the chains on which they differ."""
    by_chain = {name: variant_ratios(chain["ablation"]) for name, chain in chains.items()}
    names = list(next(iter(by_chain.values())))
    rows = [
        {"chain": chain, "ratios": [values[name] for name in names]}
        for chain, values in by_chain.items()
        if any(ratio != 1.0 for ratio in values.values())
    ]
    same = len(by_chain) - len(rows)
    mean = f"**geometric mean of {len(by_chain)}** ({same} not shown: all 1)"
    means = [geometric_mean(values[name] for values in by_chain.values()) for name in names]
    return {"variants": names, "ablation": [*rows, {"chain": mean, "ratios": means}]}
