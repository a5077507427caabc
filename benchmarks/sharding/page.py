"""Section of ``docs/results/parallel.md``: sharding plans measured on GPUs, beside peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render
from benchmarks.sharding.gpu.results import PLANNER

Row = Mapping[str, Any]
GRAPHS = results("sharding") / "gpu_plans_2.json"
LAUNCHED = results("sharding") / "gpu_plans_4_launched.json"
FIRST = results("sharding") / "gpu_plans_4.json"
BUSY = results("sharding") / "gpu_plans_4_busy.json"
CAPTURED = results("parallel") / "captured_steps_2.json"
ENGINES = results("parallel") / "captured_engines_2.json"
FIT = results("sharding") / "processor_fit.json"


def section() -> str:
    """The whole section."""
    graphs, launched, first, busy = map(load, (GRAPHS, LAUNCHED, FIRST, BUSY))
    values = {
        "agreement": [
            *agreement(graphs, way="graphs", file=GRAPHS),
            *agreement(launched, way="launched", file=LAUNCHED),
        ],
        **_like_for_like(graphs, launched),
        **_launches([r for r in graphs["records"] if r.get("in_graph")]),
        "graph_plans": plans_and_peers(graphs),
        "launched_plans": plans_and_peers(launched),
        "earlier": [
            {"run": run, "file": file, "model": model, **group}
            for run, file, record in (("first", FIRST, first), ("second", BUSY, busy))
            for model, group in record["summary"]["models"].items()
        ],
        "gpt_collective_s": _collective_seconds(first["records"], "gpt"),
        "captured": _captured(CAPTURED),
        "engines": _captured(ENGINES),
        "engines_file": ENGINES,
        "captured_file": CAPTURED,
        "fit": load(FIT),
        "fit_file": FIT,
        "measured": launched["sessions"][0]["measured"],
    }
    return render(__file__, values)


def _captured(file: Path) -> Row:
    """Captured steps of the trainer, with the worst error of gradients."""
    content = load(file)
    records = []
    for row in content["records"]:
        errors = row.get("gradient_errors", {}).values()
        records.append({**row, "worst": f"{max(errors):.0e}" if errors else None})
    return {**content, "records": records}


def agreement(record: Row, **more: Any) -> list[Row]:
    """Predictions against measured times, by model."""
    about = record["sessions"][0]["about"]
    return [
        {
            **group,
            **more,
            "gpus": about["gpus"],
            "device": about["device"],
            "model": model,
            "gradient_errors": [
                r["gradient_error"]
                for r in record["records"]
                if r["model"] == model and "gradient_error" in r
            ],
        }
        for model, group in record["summary"]["models"].items()
    ]


def plans_and_peers(record: Row) -> list[Row]:
    """What a run measured, the fastest first; the planner's plans are bold."""
    measured = [r for r in record["records"] if "measured_s" in r]
    return [
        {
            **r,
            "mesh": r["mesh"] or "peer",
            "plan": f"**{r['plan']}**" if r["plan"] == PLANNER else r["plan"],
        }
        for r in sorted(measured, key=lambda r: (r["model"] != "gpt", r["measured_s"]))
    ]


def _like_for_like(graphs: Row, launched: Row) -> Row:
    """Peers against plans that the processor launches as it does the peers."""
    columns: dict[str, dict[str, Any]] = {}
    own, others = launched["summary"]["models"], graphs["summary"]["models"]
    for name, group in own.items():
        columns[f"{name}, 4 GPUs"] = {peer: _over(value) for peer, value in group["peers"].items()}
    for name in own:
        chosen = _chosen(graphs, name)
        columns[f"{name}, 2 GPUs"] = {
            peer: value["measured_s"] / chosen["launched_alone_s"]
            for peer, value in others[name]["peers"].items()
        }
    peers = dict.fromkeys(peer for column in columns.values() for peer in column)
    first = next(iter(own))
    return {
        "ddp_less": 1 - own["gpt"]["peers"]["DDP"]["over_plan"],
        "gpt": _chosen(launched, "gpt"),
        "peer_columns": list(columns),
        "peers": {peer: [column.get(peer) for column in columns.values()] for peer in peers},
        "models": list(own),
        "graph_peers": {
            peer: [others[model]["peers"][peer]["over_plan"] for model in own]
            for peer in others[first]["peers"]
        },
    }


def _chosen(record: Row, model: str) -> Row:
    """The record of the plan that the planner chose for a model."""
    chosen = record["summary"]["models"][model]["chosen"]
    return next(
        r
        for r in record["records"]
        if r["model"] == model and f"{r['plan']} on {r['mesh']}" == chosen
    )


def _over(peer: Row) -> str:
    return f"**{peer['over_plan']:.2f}**" if peer["loses"] else f"{peer['over_plan']:.2f}"


def _launches(plans: Sequence[Row]) -> Row:
    """What plans gain as graphs: the processor's time of the same plans."""
    rows = []
    for model in dict.fromkeys(r["model"] for r in plans):
        own = [r for r in plans if r["model"] == model]
        launch, alone = (
            [r[key] / r["measured_s"] for r in own] for key in ("launch_s", "launched_alone_s")
        )
        rows.append({"model": model, "launch": launch, "alone": alone})
    lone = next(r for r in plans if r["model"] == "gpt" and not sum(r["collectives"].values()))
    return {"launches": rows, "lone_slower": lone["launched_alone_s"] / lone["measured_s"]}


def _collective_seconds(records: Sequence[Row], model: str) -> float:
    """Fitted seconds of a collective of a model."""
    return fit([r for r in records if "predicted_s" in r and r["model"] == model])[0][2]


def fit(plans: Sequence[Row]) -> tuple[list[float], float]:
    """Factors of operators and collectives, seconds a collective; mean relative error."""
    measured = np.array([r["measured_s"] for r in plans])
    parts = np.array(
        [[r["operators_s"], r["collectives_s"], sum(r["collectives"].values())] for r in plans]
    )
    factors, *_ = np.linalg.lstsq(parts / measured[:, None], np.ones(len(plans)), rcond=None)
    error = np.abs(parts @ factors / measured - 1).mean()
    return [float(factor) for factor in factors], float(error)
