"""Distance of annealing by trees from the optimum of the integer program, on 8 and 2 x 8 GPUs.

    python -m benchmarks run sharding.annealing --out benchmarks/sharding/results/annealing.json

The problems are those of one mesh dimension of ``sharding.planning``; on two dimensions the inner
one, with everything replicated on the outer one.  A run ends at the limit or when it is within a
hundredth of a per cent of the optimum.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import h100, one_server, servers
from benchmarks.sharding.models import MODELS
from benchmarks.sharding.planning import SIZES
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.planners.integer_program import Problem, solve
from nostall.parallel.sharding.planners.tied import tie
from nostall.parallel.sharding.planners.tree_annealing import anneal

SEEDS = 5
NEAR = 1e-4
GBYTES = (300.0, 12.5)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one run")


def main(options: argparse.Namespace) -> None:
    records: list[dict[str, Any]] = []
    for model in options.models:
        for mesh in ((8,), (2, 8)):
            with torch.device("meta"):
                job = MODELS[model](SIZES[model])
            graph = capture(job, SIZES[model].samples, mesh, model).graph
            for gbytes in GBYTES:
                cluster = one_server(8, gbytes) if len(mesh) == 1 else servers(2, 8, gbytes, gbytes)
                prices = Prices(graph, ClusterMesh(cluster, mesh), h100())
                others = replicated(graph)
                problem = Problem(prices, tie(graph, others[:-1]), len(mesh) - 1, others)
                records.append(_record(problem, options.seconds))
                print(records[-1], flush=True)
                save(options.out, kind="modelled", summary=_summary(records), records=records)
    print(_summary(records))


def _record(problem: Problem, seconds: float) -> dict[str, Any]:
    optimum = solve(problem, 120.0)
    gaps, used = [], []
    for seed in range(SEEDS):
        begin = process_time()
        found = anneal(problem, seconds, seed, optimum.objective_s * (1 + NEAR))
        used.append(round(process_time() - begin, 2))
        gaps.append(max(0.0, found.objective_s / optimum.objective_s - 1))
    return {
        "model": problem.prices.graph.name,
        "mesh": mesh_text(problem.prices.graph.mesh),
        "cluster": problem.prices.mesh.cluster.name,
        "classes": len(problem.tied.members),
        "is_integral": optimum.is_integral,
        "gaps": gaps,
        "median_gap": statistics.median(gaps),
        "cpu_seconds": used,
    }


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "instances": len(records),
        "within_one_per_cent": sum(record["median_gap"] <= 0.01 for record in records),
        "worst_median_gap": max(record["median_gap"] for record in records),
        "runs": sum(len(record["gaps"]) for record in records),
        "runs_within_one_per_cent": sum(g <= 0.01 for record in records for g in record["gaps"]),
        "longest_cpu_seconds": max(max(record["cpu_seconds"]) for record in records),
    }
