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
from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.rank_agreement import kendall
from benchmarks.harness.result_file import load
from nostall.attach.torch_compile.options import DEFAULT_TUNED_PLANS
from nostall.core.files.atomic import write_atomically
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import MAX_SLOWDOWN

PAGE = PAGES / "fusion-cost-model.md"
TAU, REGRET = 0.7, 0.05
"""Targets: tau at least, regret at most."""
_COLUMNS = (
    *("chain", "plans", "tau", "tau, held out", "regret", "regret after tuning"),
    *("plan of the model", "fastest measured plan"),
)
_RACES = (
    *("best by the model", "candidates, mean (most)", "not measured, mean"),
    *("regret, mean (largest)", "held out: regret, mean (largest)"),
)
_MEANS = ("figures", "tau, mean (median)", "regret, mean (median)", "median error, mean")
_MODELS = {
    "before": "the earlier model, by which these plans were drawn",
    "today": "the present model",
    "held out": "the present model, fitted to the other half of the chains",
}
_TAUS = ("today", "held out")

Row = Mapping[str, Any]


def text() -> str:
    """The whole page from the committed files."""
    return cost_model_page(load(MEASURED), load(FITTED))


def write() -> None:
    write_atomically(PAGE, text().encode())


def cost_model_page(measured: Row, judged: Row) -> str:
    """The page. ``measured``: the samples; ``judged``: what the model says of them."""
    chains, rows, summary = measured["chains"], judged["kernels"], judged["summary"]
    kernels = _kernels(chains, rows)
    parts = [
        wrapped(_method(measured)),
        *map(wrapped, _verdict(summary, measured, len(rows))),
        table(_MEANS, [_mean(_MODELS[key], summary[key]) for key in _MODELS]),
        "## Every kernel",
        table(_COLUMNS, [_kernel(row, kernel) for row, kernel in zip(rows, kernels, strict=True)]),
        wrapped(_across(rows, kernels)),
        *("## Tuning by measurement", *_races(summary)),
        *("## What each part of the compiler gains", *_ablation(chains)),
    ]
    return page("The cost model beside a GPU", "python -m benchmarks page fusion-cost-model", parts)


def _method(measured: Row) -> str:
    cards = sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in measured["chains"].values()})
    return (
        f"Samples: `python -m benchmarks run fusion.cost_model` on {', '.join(cards)}, "
        f"{measured['date'][:10]} ({link(MEASURED)}). Judgement: `python -m benchmarks run "
        f"fusion.cost_model_fit --judge` ({link(FITTED)}). Plans of each kernel of the explorer's "
        "partition run as CUDA graphs over copies of their memory that are larger than L2, "
        "interleaved. *Tau* is Kendall's tau-b between modelled and measured times of a kernel's "
        "plans. *Regret* is the measured time of the plan that the model ranks first over that of "
        "the fastest plan, less 1. *Held out*: fitted to half of the chains and judged on the "
        "other half, both ways; chains of one function stay together. The form of the model was "
        "chosen with both halves in view, only its coefficients were not. The present model's "
        "instructions and registers are fitted to these chains and its times to other ones, the "
        "train half of the generated chains (unseen_fit.json). Kernels with small dots have "
        "parameters of their own, which this page does not use. The held-out fits are of times. "
        "What plans are called: [names of plans](../explanation/codegen.md#names-of-plans)."
    )


def _verdict(evaluation: Row, measured: Row, kernels: int) -> list[str]:
    """Whether the targets are met by coefficients that were not fitted to the kernels judged."""
    held_out, summary = evaluation["held out"], measured["summary"]
    tau, regret = held_out["tau"]["mean"], held_out["regret"]["mean"]
    reached = [
        f"tau {tau:.2f} ({'reached' if tau >= TAU else 'not reached'}: {TAU})",
        f"regret {100 * regret:.1f} % ({'reached' if regret <= REGRET else 'not reached'}: "
        f"{100 * REGRET:.0f} %)",
    ]
    sentences = [
        f"**Held out: {', '.join(reached)}**, means over {kernels} kernels. Of {summary['plans']} "
        f"plans that ran, {summary['wrong'] or 'none'} gave another result than the first plan of "
        "its kernel."
    ]
    if summary["plans_that_did_not_run"]:
        sentences.append(
            f"Plans that did not run: {summary['plans_that_did_not_run']} (see the file)."
        )
    if left := summary["kernels"] - kernels:
        sentences.append(f"Left out, because their chains have other graphs today: {left} kernels.")
    if measured["failed"]:
        sentences.append(f"Not measured: {', '.join(measured['failed'])} (the file says why).")
    return sentences


def _mean(name: str, figures: Row) -> list[str]:
    tau, regret, relative_error = figures["tau"], figures["regret"], figures["off"]
    return [
        name,
        f"{tau['mean']:.2f} ({tau['median']:.2f})",
        f"{100 * regret['mean']:.1f} % ({100 * regret['median']:.1f} %)",
        f"{100 * relative_error['mean']:.0f} %",
    ]


def _kernels(chains: Mapping[str, Any], rows: Sequence[Row]) -> list[Row]:
    """The measured kernels that were judged."""
    return [chains[row["chain"]]["kernels"][row["number"]] for row in rows]


def _kernel(row: Row, kernel: Row) -> list[str]:
    times = {plan["plan"]: median_us(plan) for plan in measured_plans(kernel)}
    best = min(times, key=lambda plan: times[plan])
    current = row["today"]
    taus = ["–" if row[key]["tau"] is None else f"{row[key]['tau']:.2f}" for key in _TAUS]
    return [
        row["chain"],
        str(row["plans"]),
        *taus,
        f"{100 * current['regret']:.1f} %",
        f"{100 * current['races'][str(MAX_CANDIDATES)]['regret']:.1f} %",
        f"{current['first']}: {times[current['first']]:.1f} us",
        f"{best}: {times[best]:.1f} us",
    ]


def _across(rows: Sequence[Row], kernels: Sequence[Row]) -> str:
    """How the explorer's evaluators, which do not take kernel plans, order different kernels."""
    best = np.array([min(map(median_us, measured_plans(kernel))) for kernel in kernels])
    modelled_us = {
        "delta-evaluator": [kernel["modelled_us"]["delta"] for kernel in kernels],
        "latency-evaluator": [kernel["modelled_us"]["latency"] for kernel in kernels],
        "cost model": [row["today"]["first_us"] for row in rows],
    }
    sentences = []
    for name, times in modelled_us.items():
        modelled = np.array(times)
        tau = kendall(modelled, best)
        relative_error = float(np.median(np.abs(modelled / best - 1)))
        sentences.append(f"{name} tau {tau:.2f}, off by {100 * relative_error:.0f} % in the median")
    return (
        "Across kernels: the modelled time of each kernel (of the explorer's evaluators when it "
        "was measured; of the cost model its present first plan) against its fastest measured "
        f"plan: {'; '.join(sentences)}."
    )


def _races(evaluation: Row) -> list[str]:
    """Tuning replayed from the samples, by how many of the modelled best plans take part."""
    intro = wrapped(
        "Tuning measures the best plan of every scheme and some of the best plans overall, "
        f"*modelled* (none that would take {MAX_SLOWDOWN:g} times as long as the first plan). It "
        "is replayed here from the samples: candidates without a sample are left out (they may be "
        "faster than all that are known), the first plan is its own null, and the winner is not "
        f"measured a second time. The table above has the regret after tuning of {MAX_CANDIDATES} "
        "plans, the default of `nostall.fusion.codegen.autotune`; the torch.compile backend "
        f"measures {DEFAULT_TUNED_PLANS}. These numbers were chosen from this table. Plans with "
        "eager loads of shared operands take part as well; there are no samples of them."
    )
    rows = []
    current, held_out = evaluation["today"]["races"], evaluation["held out"]["races"]
    for max_candidates, race in current.items():
        count = race["candidates"]
        cells = [f"{count['mean']:.1f} ({count['most']})", f"{race['unknown']['mean']:.1f}"]
        regrets = [_regret(race["regret"]), _regret(held_out[max_candidates]["regret"])]
        rows.append([max_candidates, *cells, *regrets])
    return [intro, table(_RACES, rows)]


def _regret(spread: Row) -> str:
    return f"{100 * spread['mean']:.1f} % ({100 * spread['most']:.1f} %)"


def _ablation(chains: Mapping[str, Any]) -> list[str]:
    """Every variant beside the whole compiler, for the chains on which they differ."""
    by_chain = {name: variant_ratios(chain["ablation"]) for name, chain in chains.items()}
    names = list(next(iter(by_chain.values())))
    intro = wrapped(
        f"Time of a variant divided by that of *{FULL}*, measured side by side; above 1 the "
        "missing part gains that much. Partitions: the explorer's, the greedy one (by bytes "
        "saved), and one grown along producers (`cover`). *First*: the modelled first plan of "
        "every kernel; *raced*: chosen by measurement. 1.000 if the kernels are the same."
    )
    rows = [
        [chain, *(f"{values[name]:.3f}" for name in names)]
        for chain, values in by_chain.items()
        if any(ratio != 1.0 for ratio in values.values())
    ]
    same = len(by_chain) - len(rows)
    means = [geometric_mean(values[name] for values in by_chain.values()) for name in names]
    mean = f"**geometric mean of {len(by_chain)}** ({same} not shown: all 1)"
    rows.append([mean, *(f"{value:.3f}" for value in means)])
    return [intro, table(("chain", *names), rows)]
