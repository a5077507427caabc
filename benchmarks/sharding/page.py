"""Section of ``docs/results/parallel.md``: sharding plans measured on GPUs, beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.sharding.gpu.results import PLANNER

Row = Mapping[str, Any]
GRAPHS = results("sharding") / "gpu_plans_2.json"
LAUNCHED = results("sharding") / "gpu_plans_4_launched.json"
FIRST = results("sharding") / "gpu_plans_4.json"
BUSY = results("sharding") / "gpu_plans_4_busy.json"
FIT = results("sharding") / "processor_fit.json"


def section() -> str:
    """The whole section."""
    intro = wrapped(
        "A step is a forward and a backward pass (`python -m benchmarks run sharding.gpu_plans`): "
        "plans of rules, of mixed rules and of the planner, and PyTorch's DDP, FSDP2 and tensor "
        "parallelism written by hand. On two GPUs, plans ran as CUDA graphs; on four, each "
        "operator was launched by itself. Predictions use collectives and rates that the same run "
        "measured. "
        "Tau is Kendall's, among pairs of plans whose intervals of 95 % do not overlap. Regret is "
        "that of the planner's plan with the best prediction, against the fastest plan."
    )
    parts = ["## Sharding plans on GPUs", intro, _agreement(), _like_for_like(), _launches()]
    parts += [_plans(GRAPHS), _plans(LAUNCHED), _earlier()]
    return "\n\n".join(parts)


def _agreement() -> str:
    head = ("GPUs", "model", "plans", "pairs", "tau", "regret", "MAPE", "planner's plan",
            "fastest plan", "gradients within")  # fmt: skip
    rows = []
    for path, way in ((GRAPHS, "graphs"), (LAUNCHED, "launched")):
        record = load(path)
        about = record["sessions"][0]["about"]
        label = f"{about['gpus']} {about['device'].removeprefix('NVIDIA ')}, {way} ({link(path)})"
        for name, g in record["summary"]["models"].items():
            own = [r for r in record["records"] if r["model"] == name]
            rows.append(
                [label, name, str(g["plans"]), str(g["pairs"]), f"{g['tau']:.2f}",
                 f"{100 * g['regret']:.1f} %", f"{100 * g['mape']:.1f} %", g["chosen"],
                 g["fastest"], f"{_worst(own):.1g}"]
            )  # fmt: skip
    after = wrapped(
        "Gradients are compared with those of one process in bfloat16: norm of the difference over "
        "the norm."
    )
    return f"{table(head, rows)}\n\n{after}"


def _like_for_like() -> str:
    """Peers against plans that the processor launches as it does the peers."""
    launched, graphs = load(LAUNCHED), load(GRAPHS)
    models = list(launched["summary"]["models"])
    columns: dict[str, dict[str, str]] = {}
    for name in models:
        own = launched["summary"]["models"][name]["peers"]
        columns[f"{name}, 4 GPUs"] = {peer: _over(value) for peer, value in own.items()}
    for name in models:
        group = graphs["summary"]["models"][name]
        chosen = next(r for r in graphs["records"] if _is_chosen(r, name, group["chosen"]))
        columns[f"{name}, 2 GPUs"] = {
            peer: f"{value['measured_s'] / chosen['launched_alone_s']:.2f}"
            for peer, value in group["peers"].items()
        }
    peers = dict.fromkeys(peer for column in columns.values() for peer in column)
    rows = [[peer, *(column.get(peer, "–") for column in columns.values())] for peer in peers]
    gpt = launched["summary"]["models"]["gpt"]
    own = next(r for r in launched["records"] if _is_chosen(r, "gpt", gpt["chosen"]))
    less = 1 - gpt["peers"]["DDP"]["over_plan"]
    text = wrapped(
        "Peers like for like: the processor launches plans and peers operator by operator. Time of "
        "each peer over that of the planner's plan (above 1: the plan is faster; bold: the plan is "
        "slower by more than 3 % beyond the intervals). On two GPUs, the plan's time is that from "
        "an idle GPU, which is longer than in a row of steps. "
        f"DDP takes {100 * less:.0f} % less time than the GPT's plan on four GPUs. The likely "
        f"reason is the processor, which takes {1e3 * own['launch_s']:.0f} of the plan's "
        f"{1e3 * own['measured_s']:.0f} ms to launch it: each operator is a call "
        "from Python, while C++ launches DDP's backward pass. For the classifier, whose operators "
        "last longer, the plan is faster."
    )
    graph_rows = [
        [peer, *(f"{graphs['summary']['models'][m]['peers'][peer]['over_plan']:.2f}"
                 for m in models)]
        for peer in graphs["summary"]["models"][models[0]]["peers"]
    ]  # fmt: skip
    unlike = wrapped(
        "Not like for like: plans as CUDA graphs on two GPUs beside the same peers, which are "
        "launched operator by operator and were not captured. `nostall launch` does not capture "
        "plans."
    )
    return "\n\n".join(
        [text, table(("peer", *columns), rows), unlike, table(("peer", *models), graph_rows)]
    )


def _is_chosen(record: Row, model: str, chosen: str) -> bool:
    return record["model"] == model and f"{record['plan']} on {record['mesh']}" == chosen


def _launches() -> str:
    """What plans gain as graphs: the processor's time of the same plans."""
    plans = [r for r in load(GRAPHS)["records"] if r.get("in_graph")]
    rows = []
    for name in dict.fromkeys(r["model"] for r in plans):
        own = [r for r in plans if r["model"] == name]
        share = [r["launch_s"] / r["measured_s"] for r in own]
        slower = [r["launched_alone_s"] / r["measured_s"] for r in own]
        rows.append([name, f"{min(share):.2f} to {max(share):.2f}",
                     f"{min(slower):.2f} to {max(slower):.2f}"])  # fmt: skip
    lone = next(r for r in plans if r["model"] == "gpt" and not sum(r["collectives"].values()))
    text = wrapped(
        "What the processor takes, on two GPUs: time in which it launches a plan, and time of the "
        "plan launched so from an idle GPU, both over the time as a graph. Launches do not explain "
        "all of it: the GPT's plan without collectives, with the least share, takes "
        f"{lone['launched_alone_s'] / lone['measured_s']:.2f} times as long, too."
    )
    head = ("model", "launch / step as a graph", "launched one by one / step as a graph")
    return f"{text}\n\n{table(head, rows)}"


def _earlier() -> str:
    """Two runs on four GPUs whose plans were launched operator by operator."""
    first, busy = load(FIRST)["summary"]["models"], load(BUSY)["summary"]["models"]
    explained = load(FIT)
    best, alone = explained["best"], _fits(load(FIRST)["records"])
    measured = load(LAUNCHED)["sessions"][0]["measured"]
    rows = [
        [label, name, str(g["plans"]), f"{g['tau']:.2f}", f"{100 * g['regret']:.1f} %",
         f"{100 * g['mape']:.0f} %", f"{g['peers']['DDP']['over_plan']:.2f}",
         f"{g['peers']['FSDP2']['over_plan']:.2f}"]
        for label, groups in ((f"first ({link(FIRST)})", first), (f"second ({link(BUSY)})", busy))
        for name, g in groups.items()
    ]  # fmt: skip
    text = wrapped(
        "Two earlier runs on 4 H200 launched each gradient's collective by itself, the first "
        "without overlap; other work used the host's processors during the second:"
    )
    head = ("run", "model", "plans", "tau", "regret", "MAPE", "DDP / plan", "FSDP2 / plan")
    after = wrapped(
        f"What explains them: fitted to the first run, each collective of the GPT adds "
        f"{1e3 * alone['gpt']:.2f} ms whatever its size; fitted to the second, with "
        f"{best['launch_us']} µs for each operator and {best['send_us']} µs for each collective "
        f"the model has an error of {100 * best['mape']:.1f} % and a tau of {best['tau']:.2f} "
        f"(`sharding.processor_fit`, {link(FIT)}). The later run on four GPUs measured "
        f"{1e6 * measured['launch_s']:.0f} and {1e6 * measured['send_s']:.0f} µs by launching two "
        "plans, predicts with these, and chooses the fastest plans. Gradients below 25 MB now "
        "share a collective as in DDP; for the GPT, whose matrices are larger, buckets hold the "
        "norms alone."
    )
    return f"{text}\n\n{table(head, rows)}\n\n{after}"


def _fits(records: Sequence[Row]) -> dict[str, float]:
    """Fitted seconds of a collective by model."""
    names = dict.fromkeys(r["model"] for r in records)
    plans = [r for r in records if "predicted_s" in r]
    return {name: fit([r for r in plans if r["model"] == name])[0][2] for name in names}


def _worst(records: Sequence[Row]) -> float:
    return max(r["gradient_error"] for r in records if "gradient_error" in r)


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


def _plans(path: Path) -> str:
    """All plans and peers of a run."""
    rows, records = [], load(path)["records"]
    for r in sorted(records, key=lambda r: (r["model"] != "gpt", r["measured_s"])):
        low, high = (f"{1e3 * v:.2f}" for v in r["interval_s"])
        predicted = f"{1e3 * r['predicted_s']:.2f}" if "predicted_s" in r else "–"
        name = f"**{r['plan']}**" if r["plan"] == PLANNER else r["plan"]
        rows.append([r["model"], r["mesh"] or "peer", name, predicted,
                     f"{1e3 * r['measured_s']:.2f}", f"{low} to {high}"])  # fmt: skip
    head = ("model", "mesh", "plan", "predicted, ms", "measured, ms", "interval, ms")
    way = "as CUDA graphs" if path == GRAPHS else "launched operator by operator"
    return f"Plans {way}, and peers launched operator by operator:\n\n{table(head, rows)}"
