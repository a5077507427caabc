"""Benchmark of the explorers: modelled gap to the optimum of the integer program, and run time.

    python -m benchmarks run fusion.explorers --out benchmarks/fusion/results/explorers.json

Gaps are measured on every distinct region of 5 to 60 operators of
``benchmarks.fusion.small_models``, forward and backward.  The delta-evaluator compares partitions
into connected patterns (before kernel packing), because those are the columns of the integer
program; ``packed`` is the explorer's final partition.  The optimum of regions with more than
``--columns`` legal patterns is not proven; they are counted separately.

Run time is measured on models repeated to 100 to 5,000 nodes.
"""

from __future__ import annotations

import argparse
import math
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.fusion.graphs import NamedGraph, capture_passes, model_regions, repeat_graph
from benchmarks.harness.result_file import save
from nostall.fusion import Graph
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import explore, greedy_partition, refine
from nostall.fusion.explore.integer_program import find_optimum
from nostall.fusion.graph.partition import Partition
from nostall.fusion.graph.regions import find_regions

PLANNERS = ("explorer", "annealed", "greedy", "beam", "unfused")
SIZES = (100, 500, 1000, 2000, 5000)
"""Nodes of the repeated graphs."""
MIN_OPERATORS, MAX_OPERATORS = 5, 60
"""Operators of the regions."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=200_000, help="maximum legal patterns")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="solver's time limit for each region"
    )


def main(options: argparse.Namespace) -> None:
    growth = _time_growth()
    records: list[dict[str, Any]] = []
    for region in sorted(
        model_regions(MIN_OPERATORS, MAX_OPERATORS), key=lambda region: len(region.graph.operators)
    ):
        records.append(_compare(region, options.columns, options.seconds))
        print(records[-1])
        save(
            options.out,
            kind="modelled",
            libraries={name: version(name) for name in ("torch", "scipy")},
            columns=options.columns,
            summary=_summary(records),
            growth=growth,
            records=records,
        )


def _compare(named: NamedGraph, columns: int, seconds: float) -> dict[str, Any]:
    evaluator = DeltaEvaluator(named.graph)
    explored = explore(evaluator)
    annealed = refine(evaluator, explored.connected)
    start = process_time()
    optimum = find_optimum(
        evaluator, max_columns=columns, seconds=seconds, known=annealed.connected
    )
    solver_seconds = process_time() - start
    plans = {
        "explorer": explored.connected,
        "annealed": annealed.connected,
        "greedy": greedy_partition(evaluator),
        "beam": explored.from_beam,
        "unfused": Partition.unfused(named.graph),
    }
    costs = {name: evaluator.cost(plan) for name, plan in plans.items()}
    optimum_seconds = evaluator.cost(optimum.partition) if optimum.proven else None
    return {
        "name": named.name,
        "key": named.graph.key[:16],
        "operators": len(named.graph.operators),
        "patterns": optimum.columns,
        "proven": optimum.proven,
        "stopped": optimum.stopped,
        "circles_cut": max(0, optimum.rounds - 1),
        "optimum_us": _microseconds(optimum_seconds),
        "optimum_seconds": round(solver_seconds, 3),
        "us": {name: _microseconds(cost) for name, cost in costs.items()},
        "packed_us": _microseconds(evaluator.cost(explored.partition)),
        "packed_annealed_us": _microseconds(evaluator.cost(annealed.partition)),
        "kernels": {name: len(plan) for name, plan in plans.items()}
        | {"packed": len(explored.partition)},
        "gaps": None
        if optimum_seconds is None
        else {name: round(cost / optimum_seconds - 1, 6) for name, cost in costs.items()},
    }


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 4)


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    proven = [record for record in records if record["proven"]]
    unproven = [record for record in records if not record["proven"]]
    return {
        "regions": len(records),
        "proven": len(proven),
        "not_proven": len(unproven),
        "several_kernels": sum(_kernel_count(record) > 1 for record in proven),
        "gaps": {
            name: _distribution([record["gaps"][name] for record in proven]) for name in PLANNERS
        },
        "annealed_over_explorer_not_proven": _mean_ratio(unproven, "annealed"),
        "greedy_over_explorer_not_proven": _mean_ratio(unproven, "greedy"),
    }


def _kernel_count(record: dict[str, Any]) -> int:
    return int(record["kernels"]["annealed"])


def _mean_ratio(records: list[dict[str, Any]], name: str) -> float | None:
    """Geometric mean of a planner's modelled time / the explorer's; None without records."""
    if not records:
        return None
    logarithms = [math.log(record["us"][name] / record["us"]["explorer"]) for record in records]
    return round(math.exp(sum(logarithms) / len(logarithms)), 6)


def _distribution(gaps: list[float]) -> dict[str, float]:
    if not gaps:
        return {}
    quantiles = np.quantile(gaps, [0, 0.5, 0.9, 1])
    names = ("min", "median", "q90", "max")
    distribution = {
        name: round(float(value), 6) for name, value in zip(names, quantiles, strict=True)
    }
    count = sum(gap <= 0.03 for gap in gaps)
    return distribution | {"mean": round(float(np.mean(gaps)), 6), "within_3_percent": count}


def _time_growth() -> list[dict[str, Any]]:
    """Time the explorer on repeated BERT forward passes and on one repeated region."""
    bert = capture_passes("bert")["forward"].graph
    norms = find_regions(capture_passes("double-norm")["forward"].graph)
    longest = max((region.graph for region in norms), key=lambda graph: len(graph.operators))
    records = []
    for name, graph in (("bert forward", bert), ("double-norm forward, one region", longest)):
        for size in SIZES:
            if size >= len(graph):
                records.append(_time_explorer(name, repeat_graph(graph, size)))
                print(records[-1])
    return records


def _time_explorer(name: str, graph: Graph) -> dict[str, Any]:
    wall_start, cpu_start = perf_counter(), process_time()
    evaluator = DeltaEvaluator(graph)
    explored = explore(evaluator)
    cpu_seconds, wall_seconds = process_time() - cpu_start, perf_counter() - wall_start
    return {
        "name": name,
        "nodes": len(graph),
        "operators": len(graph.operators),
        "processor_seconds": round(cpu_seconds, 3),
        "wall_seconds": round(wall_seconds, 3),
        "kernels": len(explored.partition),
    }
