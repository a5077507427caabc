"""Planning time of large problems on one core, and the effect of merging layers for DAPPLE.

    python -m benchmarks run parallel.planning_time \\
        --out benchmarks/parallel/results/planning_time.json

Planning times are measured without JIT compilation, because a tiny problem is planned first.  The
iteration times of the plans are modelled.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.parallel.instances import random_chain
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.plan import Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import simulated_s

SIZES = ((30, 1, 8), (100, 2, 8), (300, 2, 8), (300, 4, 8), (1000, 4, 8), (1000, 8, 8))
"""(layers, servers, GPUs per server)."""
PLANNERS = ("spp", "nostall", "dapple")
CUT_LIMITS = (100, 50, 25)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    for planner in PLANNERS:
        make_plan(_problem(6, 2, 2), planner, Effort(60, 10))
    growth = []
    for layers, servers, gpus in SIZES:
        work = _problem(layers, servers, gpus)
        for planner in PLANNERS:
            growth.append(_time_planner(work, planner))
            print(growth[-1], flush=True)
    merging = [_plan_with_cut_limit(limit) for limit in CUT_LIMITS]
    print(merging)
    save(options.out, growth=growth, merging=merging)


def _problem(layers: int, servers: int, gpus: int) -> Workload:
    cluster = parse_cluster(
        f'name = "{servers} x {gpus}"\n[[servers]]\ncount = {servers}\ngpus = {gpus}\n'
        "memory_gib = 80\nlink = { bandwidth_gbytes = 100, latency_us = 5 }\n"
        "[network]\nbandwidth_gbytes = 2\nlatency_us = 10\n"
    )
    chain = random_chain(layers, np.random.default_rng(layers))
    return Workload(chain, cluster, 64, fractions=True)


def _time_planner(work: Workload, planner: str) -> dict[str, Any]:
    start = perf_counter()
    plan = make_plan(work, planner, Effort.for_workload(work))
    seconds = perf_counter() - start
    modelled = simulated_s(work, plan)
    return {
        "layers": len(work.profile),
        "gpus": len(work.cluster),
        "planner": planner,
        "planning_seconds": round(seconds, 2),
        "modelled_iteration_s": modelled,
        "modelled_speedup": work.sequential_s / modelled,
        "stages": len(plan.stages),
        "policy": plan.policy,
    }


def _plan_with_cut_limit(limit: int) -> dict[str, Any]:
    """DAPPLE on 100 layers and 16 GPUs with at most ``limit`` cut positions."""
    work = _problem(100, 2, 8)
    # By name, because ``planners.dapple`` is a function of the package.
    module = importlib.import_module("nostall.parallel.planners.dapple")
    default, module.MAX_CUTS = module.MAX_CUTS, limit
    start = perf_counter()
    plan = make_plan(work, "dapple", Effort.for_workload(work, seconds=120))
    seconds = perf_counter() - start
    module.MAX_CUTS = default
    return {
        "cuts": limit,
        "planning_seconds": round(seconds, 2),
        "modelled_iteration_s": simulated_s(work, plan),
    }
