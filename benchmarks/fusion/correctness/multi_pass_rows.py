"""Check of random graphs whose kernels read rows in several passes, compared with fp64.

    python -m benchmarks run fusion.multi_pass_rows --out OUT --graphs 240 --limit 120
        [--workers 12]

Works as ``benchmarks.fusion.correctness.shared_memory_rows``, for other schemes:

- ``looped`` and ``split`` kernels, with online softmax (maximum and sum of exp(x - maximum) in one
  pass), with online variance (mean and sum of squared differences from it in one pass) and with
  peeling (unaligned rows that are read 16 bytes at a time);
- ``column`` kernels, which loop over rows for sums of columns, with and without asynchronous copies
  of later rows.

Half of the graphs with a softmax get rows of -inf, with Inf and with NaN.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tests.unit.fusion.codegen.graphs.wide_rows import PAIRS, wide_rows, with_column_sums
from tests.unit.fusion.codegen.interpreted import online_rows, variance_rows

from benchmarks.fusion.correctness import shared_memory_rows
from benchmarks.fusion.correctness.shared_memory_rows import (
    check_graphs,
    dtypes,
    find_failures,
    on_gpu,
    repeats,
)
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.online_reductions import online_pairs, online_variances
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph

COLUMNS = (603, 1001, 1100, 2048, 2501, 4099, 5000, 12287, 32000, 50257, 131073)
MAX_SUMMED_COLUMNS, MANY_ROWS = 5000, 300
"""Maximum columns, and rows, of a graph that sums over rows."""
SOFTMAXES = (online_rows.cross_entropy, online_rows.lse_and_softmax, online_rows.random_graph)
NORMS = (variance_rows.layer_norm, variance_rows.two_norms, variance_rows.norm_of_softmax)


def draw_case(seed: int) -> tuple[Graph, Schedule, KernelPlan] | None:
    """The graph and plan for a seed; None if it has no plan of these schemes."""
    generator = random.Random(seed)
    columns = generator.choice(COLUMNS if on_gpu() else COLUMNS[:5])
    shape = online_rows.ROWS, columns
    kind = generator.choice((*SOFTMAXES, None, "sums", "norms"))
    if kind == "sums":
        columns = min(columns, MAX_SUMMED_COLUMNS)
        rows = MANY_ROWS if on_gpu() else online_rows.ROWS
        # One of a million quotients is 0 / 0 if a product is rounded, but inf if it is in an FMA.
        exact_ops = tuple(op for op in PAIRS if op != "div")
        graph = with_column_sums(wide_rows(seed, columns, *dtypes(), rows, exact_ops), generator)
    elif kind == "norms":
        graph = generator.choice(NORMS)(shape)
    elif kind is None:
        graph = wide_rows(seed, columns, *dtypes(), online_rows.ROWS)
    elif kind is online_rows.random_graph:
        graph = online_rows.random_graph(seed, shape)
    else:
        graph = kind(shape, generator.choice(dtypes()[0]))  # type: ignore[operator]
    schedule = schedule_operators(graph, graph.operators)
    legal = [
        plan for plan in plans(schedule).legal_plans if plan.scheme in ("looped", "split", "column")
    ]
    for field in (
        "peeled",
        "async_copies",
        "scheme",
    ):  # draw each field first, so that rare values are tested often
        value = generator.choice(sorted({getattr(plan, field) for plan in legal}) or [None])
        legal = [plan for plan in legal if getattr(plan, field) == value]
    return (graph, schedule, generator.choice(legal)) if legal else None


def check_graph(seed: int) -> dict[str, Any]:
    """Check the graph of a seed.  A GPU fault ends the process: CUDA is unusable after it."""
    torch.set_num_threads(1)  # there are as many workers as CPU cores
    case = draw_case(seed)
    if case is None:
        return {"seed": seed, "plan": None}
    graph, schedule, plan = case
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        whole = StitchedGraph(
            graph, (load_kernel(emit(plan_kernel(schedule, plan)), Path(folder)),), Counter()
        )
        failures = find_failures(
            whole, seed, _insert_special_values if online_pairs(schedule) and seed % 2 else None
        )
    record = {
        "seed": seed,
        "plan": str(plan),
        "online": len(online_pairs(schedule)),
        "variances": len(online_variances(schedule)) if plan.scheme != "column" else 0,
        "wrong": failures,
    }
    record["seconds"] = round(time.monotonic() - start, 1)
    return record | ({"graph": str(graph)} if failures else {})


def _insert_special_values(inputs: list[torch.Tensor]) -> None:
    """Insert rows of -inf, Inf and NaN into the inputs."""
    for value in inputs:
        if value.dtype.is_floating_point and value.shape[0] == online_rows.ROWS:
            # Compiled kernels contract a product and a difference to an FMA, so x - max(x) of a
            # product x is off by one rounding of x; that is within tolerance for small numbers.
            online_rows.insert_special_rows(value, largest=3.0)
            value[7] /= 16  # smaller, because a product that overflows may not do so in an FMA


def summary(done: dict[str, Any]) -> dict[str, Any]:
    """Counts over all records, and those of kernels that are wrong."""
    checked_records = [record for record in done.values() if record["plan"]]
    return {
        "graphs": len(done),
        "kernels": len(checked_records),
        "with a maximum and a sum in one walk": sum(
            record.get("online", 0) > 0 for record in checked_records
        ),
        "with a mean and a variance in one walk": sum(
            record.get("variances", 0) > 0 for record in checked_records
        ),
        "peeled": sum("peeled" in record["plan"] for record in checked_records),
        "rows copied ahead": sum("ahead" in record["plan"] for record in checked_records),
        "runs of each kernel": 1 + repeats(),
        "wrong": [record for record in checked_records if record["wrong"]],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    shared_memory_rows.add_options(parser)


def main(options: argparse.Namespace) -> None:
    check_graphs(options, check_graph, summary)
