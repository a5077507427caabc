"""Random graphs of wide rows with plans that walk over their rows, compared with fp64.

    python -m benchmarks run fusion.multi_pass_rows --out OUT --graphs 240 --limit 120 [--workers 12]

As ``benchmarks.fusion.correctness.shared_memory_rows``, of ``looped`` and ``split`` kernels: those whose
maximum and sum of exp(x - maximum) share a walk, and those whose rows begin at odd places and are
read 16 bytes at a time; and of ``column`` kernels, which walk over rows for the sums of columns,
those that copy the rows of the next turns among them.  Of graphs with softmaxes half get rows of
-inf, with Inf and with NaN.
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
from tests.unit.fusion.codegen import online_rows
from tests.unit.fusion.codegen.wide_rows import PAIRS, wide_rows, with_column_sums

from benchmarks.fusion.correctness import shared_memory_rows
from benchmarks.fusion.correctness.shared_memory_rows import (
    check_graphs,
    dtypes,
    on_gpu,
    repeats,
    wrong,
)
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.online_softmax import online_pairs
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph

COLUMNS = (603, 1001, 1100, 2048, 2501, 4099, 5000, 12287, 32000, 50257, 131073)
MOST_SUMMED, MANY_ROWS = 5000, 300
"""Columns and rows of a graph that sums over rows."""
SOFTMAXES = (online_rows.cross_entropy, online_rows.lse_and_softmax, online_rows.random_graph)


def drawn(seed: int) -> tuple[Graph, Schedule, KernelPlan] | None:
    """The graph of a number, and how it runs; None where no plan walks."""
    draw = random.Random(seed)
    columns = draw.choice(COLUMNS if on_gpu() else COLUMNS[:5])
    shape = online_rows.ROWS, columns
    kind = draw.choice((*SOFTMAXES, None, "sums"))
    if kind == "sums":
        columns = min(columns, MOST_SUMMED)
        rows = MANY_ROWS if on_gpu() else online_rows.ROWS
        # Among a million quotients one is 0 / 0 where a product was rounded, and inf as an FMA.
        whole = tuple(op for op in PAIRS if op != "div")
        graph = with_column_sums(wide_rows(seed, columns, *dtypes(), rows, whole), draw)
    elif kind is None:
        graph = wide_rows(seed, columns, *dtypes(), online_rows.ROWS)
    elif kind is online_rows.random_graph:
        graph = online_rows.random_graph(seed, shape)
    else:
        graph = kind(shape, draw.choice(dtypes()[0]))  # type: ignore[operator]
    of = schedule_operators(graph, graph.operators)
    legal = [plan for plan in plans(of).legal_plans if plan.scheme in ("looped", "split", "column")]
    for told in ("peeled", "async_copies", "scheme"):  # what is rare is not rare here
        chosen = draw.choice(sorted({getattr(plan, told) for plan in legal}) or [None])
        legal = [plan for plan in legal if getattr(plan, told) == chosen]
    return (graph, of, draw.choice(legal)) if legal else None


def checked(seed: int) -> dict[str, Any]:
    """What became of one graph.  A fault of the GPU ends the process: nothing works after it."""
    torch.set_num_threads(1)  # workers are as many as processors
    made = drawn(seed)
    if made is None:
        return {"seed": seed, "plan": None}
    graph, of, plan = made
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        whole = StitchedGraph(
            graph, (load_kernel(emit(plan_kernel(of, plan)), Path(folder)),), Counter()
        )
        found = wrong(whole, seed, _strange if online_pairs(of) and seed % 2 else None)
    record = {"seed": seed, "plan": str(plan), "online": len(online_pairs(of)), "wrong": found}
    record["seconds"] = round(time.monotonic() - began, 1)
    return record | ({"graph": str(graph)} if found else {})


def _strange(inputs: list[torch.Tensor]) -> None:
    for value in inputs:
        if value.dtype.is_floating_point and value.shape[0] == online_rows.ROWS:
            # Compiled, a product and a difference are one operation (FMA), so x - max(x) of a
            # product is off by a rounding of x: of small numbers that is within what is allowed.
            online_rows.insert_special_rows(value, largest=3.0)
            value[7] /= 16  # a product that overflows need not do so in an FMA


def summary(done: dict[str, Any]) -> dict[str, Any]:
    """Counts over all records, and those of kernels that are wrong."""
    ran = [record for record in done.values() if record["plan"]]
    return {
        "graphs": len(done),
        "kernels": len(ran),
        "with a maximum and a sum in one walk": sum(record.get("online", 0) > 0 for record in ran),
        "peeled": sum("peeled" in record["plan"] for record in ran),
        "rows copied ahead": sum("ahead" in record["plan"] for record in ran),
        "runs of each kernel": 1 + repeats(),
        "wrong": [record for record in ran if record["wrong"]],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    shared_memory_rows.add_options(parser)


def main(options: argparse.Namespace) -> None:
    check_graphs(options, checked, summary)
