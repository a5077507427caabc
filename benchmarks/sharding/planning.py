"""Modelled step of shardings of eight models: the planner beside each rule, integrality, seconds.

    python -m benchmarks run sharding.planning --out benchmarks/sharding/results/planning.json

On 8 GPUs of one server and on 2 x 8, with three bandwidths each; H100 rates, float32. Capture is
timed apart from planning: it is the same for all bandwidths.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import h100, one_server, servers
from benchmarks.sharding.models import MODELS, Size
from nostall.parallel.cluster import Cluster
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.planners.sharding import Options, plan_sharding
from nostall.parallel.sharding.planners.tied import tie

_TEXT = Size(
    layers=12,
    width=1024,
    heads=16,
    inner=4096,
    vocabulary=32_000,
    length=512,
    samples=32,
    dtype=torch.float32,
)
SIZES = {
    "bert": _TEXT,
    "gpt2": _TEXT,
    "llama": _TEXT,
    "t5": replace(_TEXT, layers=6, width=512, heads=8, inner=2048),
    "vgg": replace(_TEXT, layers=4, width=64, inner=4096, vocabulary=1000, length=64),
    "resnet": replace(_TEXT, layers=8, width=128, vocabulary=1000, length=56),
    "wide_classifier": replace(_TEXT, layers=3, width=2048, vocabulary=256_000, samples=1024),
    "experts": replace(_TEXT, layers=4, width=1024, inner=4096, samples=16, experts=16),
}
"""Size of each model."""
GBYTES = (300.0, 50.0, 12.5)
"""Bandwidths of the links of one server, in GB/s."""
NETWORK_GBYTES = (200.0, 50.0, 12.5)
"""Bandwidths of a server's network port, with links of 300 GB/s inside servers."""
SECONDS = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))


def main(options: argparse.Namespace) -> None:
    records: list[dict[str, Any]] = []
    for model in options.models:
        for mesh in ((8,), (2, 8)):
            records += _instances(model, mesh)
            save(options.out, kind="modelled", summary=_summary(records), records=records)
    print(_summary(records))


def _instances(model: str, mesh: tuple[int, ...]) -> list[dict[str, Any]]:
    size = SIZES[model]
    torch.manual_seed(0)
    with torch.device("meta"):
        job = MODELS[model](size)
    start = perf_counter()
    step = capture(job, size.samples, mesh, model)
    capture_s = round(perf_counter() - start, 2)
    clusters = (
        [one_server(8, gbytes) for gbytes in GBYTES]
        if len(mesh) == 1
        else [servers(2, 8, 300.0, gbytes) for gbytes in NETWORK_GBYTES]
    )
    records = []
    for cluster in clusters:
        records.append({**_plan(step, cluster), "capture_seconds": capture_s})
        print(
            {k: records[-1][k] for k in ("model", "cluster", "planning_seconds", "over_best_rule")}
        )
    return records


def _plan(step: CapturedStep, cluster: Cluster) -> dict[str, Any]:
    prices = Prices(step.graph, ClusterMesh(cluster, step.graph.mesh), h100())
    start, cpu = perf_counter(), process_time()
    best, rules = plan_sharding(prices, Options(min(cluster.memory), seconds=SECONDS))
    seconds, cpu = perf_counter() - start, process_time() - cpu
    tied = tie(step.graph)
    times = {rule.name: rule.step_s for rule in rules}
    return {
        "model": step.graph.name,
        "cluster": cluster.name,
        "mesh": mesh_text(step.graph.mesh),
        "operators": len(step.graph.operators),
        "classes": len(tied.members),
        "without_rule": len(step.graph.without_rule),
        "planning_seconds": round(seconds, 2),
        "planning_cpu_seconds": round(cpu, 2),
        "step_s": best.step_s,
        "collectives_s": best.times.collectives_s,
        "exposed_s": best.times.exposed_s,
        "without_overlap_s": best.cost.step_s,
        "over_bound": best.step_s / best.bound_s if best.bound_s else None,
        "peak_bytes": best.memory.peak,
        "rules_s": times,
        "over_best_rule": min(times.values()) / best.step_s,
        "solutions": [
            {
                "is_integral": solution.is_integral,
                "gap": solution.objective_s / solution.bound_s - 1,
                "columns": solution.columns,
                "rows": solution.rows,
                "seconds": round(solution.seconds, 2),
            }
            for solution in best.solutions
        ],
    }


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    programs = [solution for record in records for solution in record["solutions"]]
    over_bound = sorted(r["over_bound"] for r in records if r["over_bound"] is not None)
    return {
        "instances": len(records),
        "programs": len(programs),
        "integral": sum(program["is_integral"] for program in programs),
        "worst_gap": max(program["gap"] for program in programs),
        "bounded": len(over_bound),
        "median_over_bound": over_bound[len(over_bound) // 2] if over_bound else None,
        "largest_over_bound": max(over_bound, default=None),
        "worse_than_a_rule": sum(record["over_best_rule"] < 1 - 1e-9 for record in records),
        "largest_gain_over_best_rule": max(record["over_best_rule"] for record in records),
        "longest_planning_cpu_seconds": max(record["planning_cpu_seconds"] for record in records),
        "longest_planning_seconds": max(record["planning_seconds"] for record in records),
    }
