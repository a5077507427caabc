"""Time of the processor for an operator and a collective that explains measured sharding plans.

    python -m benchmarks run sharding.processor_fit --out benchmarks/sharding/results/OUT.json

Makes the plans of results/gpu_plans_4_busy.json again from the rates that its run measured, and
models their steps with other times for the launch of an operator and the start of a collective.
The pair with the least mean relative error is in-sample: it is fitted to these plans.  With the
version of torch of that run (2.11), the plans are the same.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.result_file import load, results, save
from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.gpu.candidates import candidates, meshes
from benchmarks.sharding.gpu.models import MODELS
from benchmarks.sharding.gpu.results import tau
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, CollectiveCost, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.planners.sharding import ShardingPlan

SOURCE = results("sharding") / "gpu_plans_4_busy.json"
MODEL, GPUS, PLANNING_S = "gpt", 4, 10.0
LAUNCH_US = (15, 20, 25, 30, 35, 40, 50, 60)
SEND_US = (60, 100, 150, 200, 250, 300, 400)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    source = load(SOURCE)
    measured = {(r["mesh"], r["plan"]): r for r in source["records"] if "predicted_s" in r}
    rates = source["sessions"][0]["measured"]
    plans = [
        (plan, measured[mesh_text(mesh), plan.name])
        for mesh in meshes(GPUS)
        for plan in _plans(mesh, rates)
    ]
    same = sum(plan.times.counts == record["collectives"] for plan, record in plans)
    pairs = [
        {"launch_us": launch, "send_us": send, **_agreement(plans, launch * 1e-6, send * 1e-6)}
        for launch, send in itertools.product(LAUNCH_US, SEND_US)
    ]
    best = min(pairs, key=lambda pair: float(pair["mape"]))
    as_measured = _agreement(plans, rates["launch_s"], rates["send_s"])
    save(
        options.out,
        kind="modelled",
        torch=torch.__version__,
        source=SOURCE.name,
        plans=len(plans),
        plans_with_equal_collectives=same,
        as_measured=as_measured,
        best=best,
        pairs=pairs,
    )
    print(best, as_measured, f"{same} of {len(plans)} plans are those of the run")


def _plans(mesh: tuple[int, ...], measured: dict[str, Any]) -> list[ShardingPlan]:
    with torch.device("meta"):
        job = MODELS[MODEL](False).job
    costs: Any = {
        (c["kind"], c["mesh_dim"]): CollectiveCost(c["latency_s"], c["s_per_byte"])
        for c in measured["collectives"]
        if c["mesh"] == mesh_text(mesh)
    }
    rates = DeviceRates(
        "measured", measured["flops"], measured["memory_bytes_per_s"], 0.0,
        measured["launch_s"], measured["send_s"], measured["contention"],
    )  # fmt: skip
    step = capture(job, job.samples, mesh, MODEL)
    cluster = ClusterMesh(one_server(GPUS, 300.0), mesh, costs)
    return candidates(Prices(step.graph, cluster, rates), PLANNING_S)


def _agreement(
    plans: Sequence[tuple[ShardingPlan, dict[str, Any]]], launch_s: float, send_s: float
) -> dict[str, Any]:
    """Mean relative error and Kendall's tau."""
    rows = []
    for plan, record in plans:
        rates = replace(plan.prices.rates, launch_s=launch_s, send_s=send_s)
        predicted = timeline(replace(plan.prices, rates=rates), plan.assignment).step_s
        rows.append({**record, "predicted_s": predicted})
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    return {"mape": sum(errors) / len(errors), **tau(rows)}
