"""Gap of the explorers to the integer programme's optimum on regions of real models, modelled time.

    python -m benchmarks run fusion.explorers --out benchmarks/fusion/results/explorers.json

Every distinct region of 5 to 60 operators of ``benchmarks.fusion.small_models``, forward and backward.
All plans are compared by the delta-evaluator, as plans of connected patterns (before remote
fusion), because those are the programme's columns; ``packed`` is the explorer's final plan.
Regions with more than ``--columns`` legal patterns are not proven and counted apart.  Then the
explorer's seconds on models repeated to 100 ... 5,000 nodes.
"""

from __future__ import annotations

import argparse
import math
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.fusion.graphs import Named, captured, repeated, subgraphs
from benchmarks.harness.result_file import save
from nostall.fusion import Graph
from nostall.fusion.evaluate import DeltaEvaluator
from nostall.fusion.explore import explore, greedy_partition, refine
from nostall.fusion.explore.integer_program import find_optimum
from nostall.fusion.graph.partition import Partition
from nostall.fusion.graph.regions import find_regions

PLANNERS = ("explorer", "annealed", "greedy", "beam", "unfused")
SIZES = (100, 500, 1000, 2000, 5000)
LEAST, MOST = 5, 60


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the solver, each region")


def main(options: argparse.Namespace) -> None:
    growth = _growth()
    records: list[dict[str, Any]] = []
    for named in sorted(subgraphs(LEAST, MOST), key=lambda named: len(named.graph.operators)):
        records.append(_compared(named, options.columns, options.seconds))
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


def _compared(named: Named, columns: int, seconds: float) -> dict[str, Any]:
    delta = DeltaEvaluator(named.graph)
    explored = explore(delta)
    annealed = refine(delta, explored.connected)
    started = process_time()
    best = find_optimum(delta, max_columns=columns, seconds=seconds, known=annealed.connected)
    spent = process_time() - started
    plans = {
        "explorer": explored.connected,
        "annealed": annealed.connected,
        "greedy": greedy_partition(delta),
        "beam": explored.from_beam,
        "unfused": Partition.unfused(named.graph),
    }
    costs = {name: delta.cost(plan) for name, plan in plans.items()}
    least = delta.cost(best.partition) if best.proven else None
    return {
        "name": named.name,
        "key": named.graph.key[:16],
        "operators": len(named.graph.operators),
        "patterns": best.columns,
        "proven": best.proven,
        "stopped": best.stopped,
        "circles_cut": max(0, best.rounds - 1),
        "optimum_us": _us(least),
        "optimum_seconds": round(spent, 3),
        "us": {name: _us(cost) for name, cost in costs.items()},
        "packed_us": _us(delta.cost(explored.partition)),
        "packed_annealed_us": _us(delta.cost(annealed.partition)),
        "kernels": {name: len(plan) for name, plan in plans.items()}
        | {"packed": len(explored.partition)},
        "gaps": None
        if least is None
        else {name: round(cost / least - 1, 6) for name, cost in costs.items()},
    }


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 4)


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    proven = [record for record in records if record["proven"]]
    others = [record for record in records if not record["proven"]]
    return {
        "regions": len(records),
        "proven": len(proven),
        "not_proven": len(others),
        "several_kernels": sum(_kernels(record) > 1 for record in proven),
        "gaps": {name: _distribution([r["gaps"][name] for r in proven]) for name in PLANNERS},
        "annealed_over_explorer_not_proven": _ratio(others, "annealed"),
        "greedy_over_explorer_not_proven": _ratio(others, "greedy"),
    }


def _kernels(record: dict[str, Any]) -> int:
    return int(record["kernels"]["annealed"])


def _ratio(records: list[dict[str, Any]], name: str) -> float | None:
    """Geometric mean of a planner's modelled times over the explorer's."""
    if not records:
        return None
    logs = [math.log(r["us"][name] / r["us"]["explorer"]) for r in records]
    return round(math.exp(sum(logs) / len(logs)), 6)


def _distribution(gaps: list[float]) -> dict[str, float]:
    if not gaps:
        return {}
    points = np.quantile(gaps, [0, 0.5, 0.9, 1])
    names = ("min", "median", "q90", "max")
    found = {name: round(float(at), 6) for name, at in zip(names, points, strict=True)}
    within = sum(gap <= 0.03 for gap in gaps)
    return found | {"mean": round(float(np.mean(gaps)), 6), "within_3_percent": within}


def _growth() -> list[dict[str, Any]]:
    """Seconds of the explorer on whole passes with their borders, and on one long region."""
    bert = captured("bert")["forward"].graph
    norms = find_regions(captured("double-norm")["forward"].graph)
    long = max((part.graph for part in norms), key=lambda graph: len(graph.operators))
    found = []
    for name, graph in (("bert forward", bert), ("double-norm forward, one region", long)):
        for size in SIZES:
            if size >= len(graph):
                found.append(_timed(name, repeated(graph, size)))
                print(found[-1])
    return found


def _timed(name: str, graph: Graph) -> dict[str, Any]:
    wall, started = perf_counter(), process_time()
    delta = DeltaEvaluator(graph)
    explored = explore(delta)
    spent, waited = process_time() - started, perf_counter() - wall
    return {
        "name": name,
        "nodes": len(graph),
        "operators": len(graph.operators),
        "processor_seconds": round(spent, 3),
        "wall_seconds": round(waited, 3),
        "kernels": len(explored.partition),
    }
