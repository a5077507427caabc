"""Section of ``docs/results/parallel.md``: sharding plans measured on GPUs, beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.sharding.gpu_results import PLANNER

Row = Mapping[str, Any]
CURRENT = tuple(
    path
    for name in ("gpu_plans_2", "gpu_plans_4_graphs", "gpu_plans_8")
    if (path := results("sharding") / f"{name}.json").exists()
)
"""Runs of plans as CUDA graphs."""
FIRST = results("sharding") / "gpu_plans_4.json"
BUSY = results("sharding") / "gpu_plans_4_busy.json"
FIT = results("sharding") / "processor_fit.json"


def section() -> str:
    """The whole section."""
    intro = wrapped(
        "A step is a forward and a backward pass (`python -m benchmarks run sharding.gpu_plans`). "
        "Plans of rules, of mixed rules and of the planner run as CUDA graphs, beside PyTorch's "
        "DDP, FSDP2 and tensor parallelism written by hand, which run as users write them. "
        "Predictions use collectives and rates that the same run measured. Tau is Kendall's, among "
        "pairs of plans whose intervals of 95 % do not overlap. Regret is that of the planner's "
        "plan with the best prediction, against the fastest plan."
    )
    parts = ["## Sharding plans on GPUs", intro, *map(_run, CURRENT), _earlier()]
    return "\n\n".join(parts)


def _run(path: Path) -> str:
    record = load(path)
    groups, records = record["summary"]["models"], record["records"]
    about = record["sessions"][0]["about"]
    text = wrapped(
        f"{about['gpus']} {about['device'].removeprefix('NVIDIA ')}, torch {about['torch']} "
        f"({link(path)}). All {record['summary']['plans']} plans have the loss and gradients of "
        f"one process within {_worst(records):.1g} (bfloat16, norm of the difference over the "
        "norm)."
    )
    parts = [text, _agreement(groups), _peers(groups), _launches(records), _plans(records)]
    return "\n\n".join(parts)


def _agreement(groups: Mapping[str, Row]) -> str:
    head = ("model", "plans", "pairs", "tau", "regret", "MAPE", "planner's plan", "fastest plan")
    rows = [
        [name, str(g["plans"]), str(g["pairs"]), f"{g['tau']:.2f}", f"{100 * g['regret']:.1f} %",
         f"{100 * g['mape']:.1f} %", g["chosen"], g["fastest"]]
        for name, g in groups.items()
    ]  # fmt: skip
    return table(head, rows)


def _launches(records: Sequence[Row]) -> str:
    """Why plans run as graphs: the processor's time of the same plans."""
    plans = [r for r in records if r.get("in_graph")]
    rows = []
    for name in dict.fromkeys(r["model"] for r in plans):
        own = [r for r in plans if r["model"] == name]
        share = [r["launch_s"] / r["measured_s"] for r in own]
        slower = [r["launched_alone_s"] / r["measured_s"] for r in own]
        rows.append([name, f"{min(share):.2f} to {max(share):.2f}",
                     f"{min(slower):.2f} to {max(slower):.2f}"])  # fmt: skip
    text = wrapped(
        "Launched operator by operator instead, on an idle GPU, the same plans take longer; the "
        "processor needs this share of the step to launch them. Launches do not explain all of it: "
        "the GPT's plan without collectives, with the least share, takes 1.12 times as long, too."
    )
    head = ("model", "launch / step as a graph", "launched one by one / step as a graph")
    return f"{text}\n\n{table(head, rows)}"


def _earlier() -> str:
    """Two runs on four GPUs whose plans were launched operator by operator."""
    first, busy = load(FIRST)["summary"]["models"], load(BUSY)["summary"]["models"]
    explained = load(FIT)
    best, alone = explained["best"], _fits(load(FIRST)["records"])
    rows = [
        [label, name, str(g["plans"]), f"{g['tau']:.2f}", f"{100 * g['regret']:.1f} %",
         f"{100 * g['mape']:.0f} %", f"{g['peers']['DDP']['over_plan']:.2f}",
         f"{g['peers']['FSDP2']['over_plan']:.2f}"]
        for label, groups in ((f"first ({link(FIRST)})", first), (f"second ({link(BUSY)})", busy))
        for name, g in groups.items()
    ]  # fmt: skip
    text = wrapped(
        "Two earlier runs on 4 H200 launched each operator and each gradient's collective by "
        "itself, and other work used the host's processors during the second:"
    )
    head = ("run", "model", "plans", "tau", "regret", "MAPE", "DDP / plan", "FSDP2 / plan")
    after = wrapped(
        f"What explains them: fitted to the first run, each collective of the GPT adds "
        f"{1e3 * alone['gpt']:.2f} ms whatever its size; fitted to the second, with "
        f"{best['launch_us']} µs for each operator and {best['send_us']} µs for each collective "
        f"the model has an error of {100 * best['mape']:.1f} % and a tau of {best['tau']:.2f} "
        f"(`sharding.processor_fit`, {link(FIT)}). That is the processor's time, which a CUDA "
        "graph does not need. Gradients below 25 MB now share a collective as in DDP; for the "
        "GPT, whose matrices are larger, buckets hold the norms alone, so they explain little. "
        "Plans as graphs were not measured on four or eight GPUs unless a table above says so: "
        "none were lent. `python -m benchmarks run sharding.gpu_plans --gpus 4 --out OUT.json`, or "
        "with 8, measures them."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{after}"


def _fits(records: Sequence[Row]) -> dict[str, float]:
    """Fitted seconds of a collective by model."""
    names = dict.fromkeys(r["model"] for r in records)
    plans = [r for r in records if "predicted_s" in r]
    return {name: fit([r for r in plans if r["model"] == name])[0][2] for name in names}


def _worst(records: Sequence[Row]) -> float:
    return max(r["gradient_error"] for r in records if "gradient_error" in r)


def _peers(groups: Mapping[str, Row]) -> str:
    names = dict.fromkeys(name for group in groups.values() for name in group["peers"])
    rows = [[name, *(_over(group["peers"][name]) for group in groups.values())] for name in names]
    before = "Time of each peer over that of the planner's plan (above 1: the plan is faster):"
    return f"{before}\n\n{table(('peer', *groups), rows)}"


def _over(peer: Row) -> str:
    return f"**{peer['over_plan']:.2f}**" if peer["loses"] else f"{peer['over_plan']:.2f}"


def fit(plans: Sequence[Row]) -> tuple[list[float], float]:
    """Factors of operators and collectives, seconds a collective; mean relative error."""
    measured = np.array([r["measured_s"] for r in plans])
    parts = np.array(
        [[r["operators_s"], r["collectives_s"], sum(r["collectives"].values())] for r in plans]
    )
    factors, *_ = np.linalg.lstsq(parts / measured[:, None], np.ones(len(plans)), rcond=None)
    error = np.abs(parts @ factors / measured - 1).mean()
    return [float(factor) for factor in factors], float(error)


def _plans(records: Sequence[Row]) -> str:
    rows = []
    for r in sorted(records, key=lambda r: (r["model"] != "gpt", r["measured_s"])):
        low, high = (f"{1e3 * v:.2f}" for v in r["interval_s"])
        predicted = f"{1e3 * r['predicted_s']:.2f}" if "predicted_s" in r else "–"
        name = f"**{r['plan']}**" if r["plan"] == PLANNER else r["plan"]
        rows.append([r["model"], r["mesh"] or "peer", name, predicted,
                     f"{1e3 * r['measured_s']:.2f}", f"{low} to {high}"])  # fmt: skip
    head = ("model", "mesh", "plan", "predicted, ms", "measured, ms", "interval, ms")
    return table(head, rows)
