"""Planning time of a Llama with 32 layers on 64 GPUs: capture, tying, planning.

    python -m benchmarks run sharding.large --out benchmarks/sharding/results/large.json

8 servers of 8 H100, a mesh of 8 x 8, bfloat16, 64 samples of 2,048 tokens. Parameters are on the
meta device, so the model needs no memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import h100, servers
from benchmarks.sharding.models import Size, llama
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.planners.sharding import Options, plan_sharding
from nostall.parallel.sharding.planners.tied import tie

MESH = (8, 8)
STATE_FACTOR = 8.0
"""16 bytes of state for each bfloat16 parameter: fp32 parameters and moments, and gradients."""
SECONDS = 240.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)


def main(options: argparse.Namespace) -> None:
    size = Size(options.layers, 4096, 32, 11_008, 32_000, 2048, samples=64, dtype=torch.bfloat16)
    with torch.device("meta"):
        job = llama(size)
    parameters = sum(p.numel() for p in job.module.parameters())
    start = perf_counter()
    step = capture(job, size.samples, MESH, "llama")
    captured = perf_counter()
    tied = tie(step.graph)
    print(f"captured {len(step.graph.operators)} operators in {captured - start:.1f} s", flush=True)
    cluster = servers(8, 8, 450.0, 400.0)
    prices = Prices(step.graph, ClusterMesh(cluster, MESH), h100())
    begin = perf_counter()
    best, rules = plan_sharding(prices, Options(min(cluster.memory), STATE_FACTOR, SECONDS))
    planned = perf_counter()
    result = {
        "layers": options.layers,
        "parameters": parameters,
        "operators": len(step.graph.operators),
        "classes": len(tied.members),
        "capture_seconds": round(captured - start, 1),
        "planning_seconds": round(planned - begin, 1),
        "plan": best.name,
        "step_s": best.step_s,
        "peak_bytes": best.memory.peak,
        "collectives": best.times.counts,
        "rules": [
            {
                "name": rule.name,
                "step_s": rule.step_s,
                "peak_bytes": rule.memory.peak,
                "fits": rule.fits(min(cluster.memory)),
            }
            for rule in rules
        ],
        "solutions": [
            {
                "is_integral": solution.is_integral,
                "columns": solution.columns,
                "seconds": round(solution.seconds, 2),
            }
            for solution in best.solutions
        ],
    }
    print(result)
    save(options.out, kind="modelled", **result)
