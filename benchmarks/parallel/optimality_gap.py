"""Gap of each planner to the exhaustive optimum on small random problems, in modelled time.

    python -m benchmarks run parallel.optimality_gap \\
        --out benchmarks/parallel/results/optimality_gap.json

The optimum is over all cuts, mappings and the orders in
``nostall.parallel.planners.baselines.ORDERS``, with the same simulator. ``nostall`` may also
change how many micro-batches a stage holds, so its gap can be below 0. For problems of at most
``FREE_LAYERS`` layers, ``FREE_GPUS`` GPUs and ``FREE_MICRO_BATCHES`` micro-batches, the gap to the
optimum with free order (CP-SAT) is computed, too. SPP and DAPPLE are also compared on 8 GPUs whose
links all differ.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.parallel.instances import small_problem, uneven_problem
from benchmarks.parallel.optimal_order import free_optimum
from nostall.core.errors import BadInput
from nostall.parallel.plan import Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import simulated_s

PLANNERS = ("nostall", "dapple", "spp", "pipedream", "gpipe", "even", "data-parallel")
FREE_LAYERS, FREE_GPUS, FREE_MICRO_BATCHES = 7, 3, 6
UNTIMED_S = 3600.0
"""A time limit for planners that is never reached, so plans do not depend on the machine."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=210)
    parser.add_argument("--uneven", type=int, default=60)


def main(options: argparse.Namespace) -> None:
    records = [_gaps(seed) for seed in range(options.instances)]
    summary = {name: _summary([r["gaps"][name] for r in records]) for name in PLANNERS}
    for name, quantiles in summary.items():
        print(f"{name:14}", quantiles)
    solved = [r for r in records if r["free"] is not None]
    free_summary = {
        "instances": len(solved),
        "proven": sum(r["free"]["proven"] for r in solved),
        "exhaustive_gap": _quantiles([r["free"]["exhaustive_gap"] for r in solved]),
        "nostall_gap": _quantiles([r["free"]["nostall_gap"] for r in solved]),
    }
    print("free order", free_summary)
    comparisons = [_compare_uneven(seed) for seed in range(options.uneven)]
    ratios = [c["dapple_s"] / c["spp_s"] for c in comparisons]
    uneven_summary = {
        "spp_wins": sum(r > 1.001 for r in ratios),
        "dapple_wins": sum(r < 0.999 for r in ratios),
        "ties": sum(0.999 <= r <= 1.001 for r in ratios),
        "dapple_over_spp": _quantiles(ratios),
        "spp_over_nostall": _quantiles([c["spp_s"] / c["nostall_s"] for c in comparisons]),
    }
    print(uneven_summary)
    save(
        options.out,
        kind="modelled",
        summary=summary,
        free_summary=free_summary,
        uneven_summary=uneven_summary,
        records=records,
        uneven=comparisons,
    )


def _gaps(seed: int) -> dict[str, Any]:
    work, layout = small_problem(seed)
    start = perf_counter()
    optimum = simulated_s(work, make_plan(work, "exhaustive", Effort(UNTIMED_S)))
    seconds = perf_counter() - start
    times = {name: _modelled_s(work, name) for name in PLANNERS}
    best = min(optimum, *(t for t in times.values() if t is not None))
    nostall = times["nostall"] or math.inf
    return {
        "seed": seed,
        "layout": layout,
        "layers": len(work.profile),
        "gpus": len(work.cluster),
        "micro_batches": work.micro_batches,
        "optimum_s": optimum,
        "exhaustive_seconds": round(seconds, 3),
        "gaps": {n: None if t is None else t / optimum - 1 for n, t in times.items()},
        "free": _free_order_gaps(work, optimum, nostall, best),
    }


def _free_order_gaps(
    work: Workload, optimum: float, nostall: float, best: float
) -> dict[str, Any] | None:
    """Gaps to the optimum with free order; None for problems that are too large for CP-SAT."""
    if (
        len(work.profile) > FREE_LAYERS
        or len(work.cluster) > FREE_GPUS
        or work.micro_batches > FREE_MICRO_BATCHES
    ):
        return None
    free = free_optimum(work, best)
    return {
        "optimum_s": free.seconds,
        "proven": free.proven,
        "solved": free.solved,
        "exhaustive_gap": optimum / free.seconds - 1,
        "nostall_gap": nostall / free.seconds - 1,
    }


def _modelled_s(work: Workload, planner: str) -> float | None:
    """Modelled time of the planner's plan; None if it has none (fewer layers than GPUs)."""
    try:
        return simulated_s(work, make_plan(work, planner, Effort(UNTIMED_S)))
    except BadInput:
        return None


def _compare_uneven(seed: int) -> dict[str, float]:
    work = uneven_problem(seed)
    return {"seed": seed} | {
        f"{name}_s": simulated_s(work, make_plan(work, name, Effort(UNTIMED_S)))
        for name in ("spp", "dapple", "nostall")
    }


def _summary(gaps: list[float | None]) -> dict[str, float]:
    known = [gap for gap in gaps if gap is not None]
    return {"plans": len(known), **_quantiles(known)}


def _quantiles(values: list[float]) -> dict[str, float]:
    names = ("min", "q25", "median", "q75", "q95", "max")
    points = np.quantile(values, [0, 0.25, 0.5, 0.75, 0.95, 1])
    return {name: round(float(point), 6) for name, point in zip(names, points, strict=True)}
