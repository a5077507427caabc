"""Check of random graphs with wide rows kept in shared memory, compared with fp64.

    python -m benchmarks run fusion.shared_memory_rows --out OUT --graphs 240 --limit 150
        [--workers 12]

The number of a graph is a seed.  It determines operators, dtypes, rows and columns (1,100 to
57,000), the plan (chunks, warps, rematerialization, asynchronous copies, peeling) and how buffers
share memory.  One in ``LABELLED`` graphs is a cross-entropy with two labels in each row, inside or
outside of it.  Tensors lie between guard bands; a third of the graphs get NaN, Inf and -0.0.

Each kernel runs ``REPEATS`` times more and must give the same bits every time; a data race would
change them.  Several workers share each GPU, because most of the time is compilation; a fault ends
its worker only.  OUT is a JSON file; graphs that it has are skipped.  Without a GPU kernels run in
Triton's interpreter (fp32 and fp16, one worker).  Exit code 1 if a kernel is wrong or not all
graphs ran.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.graphs.wide_rows import wide_rows
from tests.unit.fusion.codegen.interpreted.label_columns import two_label_gradient
from tools.interpreters.triton_interpreter import prepare

from benchmarks.fusion.chains.mechanisms.reuse_rules import Reuse, arena_by, emit_by
from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.on_chip import MAX_SHARED_BYTES, rematerialization_options
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph

FLOATS = ("float32", "float16")
CAST_DTYPES = ("int32", "int64", "int16", "int8", "uint8")
ONLY_COMPILED = (("bfloat16",), ("float8_e4m3fn", "float8_e5m2"))
"""Float dtypes, and dtypes cast to float, that Triton's interpreter computes wrongly."""
COLUMNS = (
    *(1100, 2048, 2500, 4096, 5000, 8192, 12288, 16384, 32000, 33000, 57000),
    *(2501, 4099, 9213, 20001, 30522, 50257),
)
"""In the second line most rows start unaligned, and some have a last chunk of few elements."""
FEWER_COLUMNS, MANY_ROWS = 5000, 300
"""Graphs with at most this many columns have this many rows, so that all SMs have blocks."""
LABELLED = 6
"""One in this many graphs is a cross-entropy with labels."""
REPEATS, REPEATS_INTERPRETED = 20, 1
"""Repeated runs of each kernel on a GPU and in the interpreter."""
EXPECTED_SECONDS = 12.0
"""Expected seconds of one graph, at most."""


@functools.cache
def on_gpu() -> bool:
    """Whether a GPU is visible.

    A function, because a worker gets its GPU after this module is imported.
    """
    return torch.cuda.is_available()


def dtypes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Float dtypes, and dtypes that are cast to float."""
    compiled_only = ONLY_COMPILED if on_gpu() else ((), ())
    return FLOATS + compiled_only[0], CAST_DTYPES + compiled_only[1]


def repeats() -> int:
    """Repeated runs of each kernel."""
    return REPEATS if on_gpu() else REPEATS_INTERPRETED


def draw_case(seed: int) -> tuple[Graph, Schedule, KernelPlan, Reuse] | None:
    """Graph, plan and kind of buffer reuse for a seed; None if no plan with shared memory fits."""
    generator = random.Random(seed)
    columns = generator.choice(COLUMNS)
    rows = MANY_ROWS if on_gpu() and columns <= FEWER_COLUMNS else 5
    if seed % LABELLED == 1:
        graph = two_label_gradient((rows, columns), generator.choice(dtypes()[0]))
    else:
        graph = wide_rows(seed, columns, *dtypes(), rows)
    schedule = schedule_operators(graph, graph.operators)
    legal = [plan for plan in plans(schedule).legal_plans if plan.scheme == "shared"]
    if not legal:
        return None
    for field in (
        "peeled",
        "async_copies",
        "rematerialized",
    ):  # draw each field first, so that rare values are tested often
        value = generator.choice(sorted({getattr(plan, field) for plan in legal}))
        legal = [plan for plan in legal if getattr(plan, field) == value]
    plan = generator.choice(legal)
    # Legal plans fit if buffers share memory by order; with less reuse they may not fit.
    return (
        graph,
        schedule,
        plan,
        generator.choice(get_args(Reuse)) if _fits(schedule, plan) else "order",
    )


def _fits(schedule: Schedule, plan: KernelPlan) -> bool:
    options = rematerialization_options(schedule, plan.async_copies, plan.peeled)[
        plan.rematerialized
    ]
    return arena_by(options, plan.chunks[0], "none").total_bytes <= MAX_SHARED_BYTES


def check_graph(seed: int) -> dict[str, Any]:
    """Check the graph of a seed.  A GPU fault ends the process: CUDA is unusable after it."""
    torch.set_num_threads(1)  # there are as many workers as CPU cores
    case = draw_case(seed)
    if case is None:
        return {"seed": seed, "plan": None}
    graph, schedule, plan, reuse = case
    start = time.monotonic()
    program = emit_by(plan_kernel(schedule, plan), reuse)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        stitched = StitchedGraph(graph, (load_kernel(program, Path(folder)),), Counter())
        failures = find_failures(
            stitched, seed, _fill_labels(seed) if seed % LABELLED == 1 else None
        )
    record = {"seed": seed, "plan": str(plan), "reuse": reuse, "shape": list(_shape(graph))}
    record |= {"wrong": failures, "seconds": round(time.monotonic() - start, 1)}
    return record | ({"graph": str(graph)} if failures else {})


def _fill_labels(seed: int) -> Callable[[list[torch.Tensor]], None]:
    """A function that fills the labels with column numbers, some of them out of range."""

    def change(inputs: list[torch.Tensor]) -> None:
        x, *labels = inputs
        generator = torch.Generator().manual_seed(seed)
        for label in labels:
            label.copy_(torch.randint(-3, x.shape[1] + 3, label.shape, generator=generator))

    return change


def find_failures(
    stitched: StitchedGraph,
    seed: int,
    change_inputs: Callable[[list[torch.Tensor]], None] | None = None,
) -> list[str]:
    """Failures of a graph's kernels in several runs, with inputs altered by ``change_inputs``."""
    inputs = random_inputs(stitched.graph, seed, "cuda" if on_gpu() else "cpu")
    if change_inputs:
        change_inputs(inputs)
    try:
        first = with_guard_bands(stitched)(*inputs)
        failures = find_value_errors(stitched, inputs, first)
        for _ in range(repeats()):
            rerun = stitched(*inputs)
            are_equal = (torch.equal(_bits(a), _bits(b)) for a, b in zip(first, rerun, strict=True))
            if not all(are_equal):
                return [*failures, "repeated runs give different bits"]
        return failures
    except OutOfBoundsWrite as stray:
        return [str(stray)]
    except Exception as error:  # any failure to compile or run a kernel is a result
        text = f"{type(error).__name__}: {error}"
        if "CUDA error" in text or "Triton Error" in text:
            print(f"{seed}: {text[:200]}", flush=True)
            os._exit(1)
        return [text]


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def _shape(graph: Graph) -> tuple[int, ...]:
    return max((graph[i].shape for i in graph.operators), key=len)


def summary(done: dict[str, Any]) -> dict[str, Any]:
    """Counts over all records, and those of kernels that are wrong."""
    records = list(done.values())
    checked_records = [record for record in records if record["plan"]]
    return {
        "graphs": len(records),
        "graphs that keep nothing or too much": len(records) - len(checked_records),
        "kernels": len(checked_records),
        "copied ahead": sum("copied ahead" in record["plan"] for record in checked_records),
        "peeled": sum("peeled" in record["plan"] for record in checked_records),
        "with labels": sum(record["seed"] % LABELLED == 1 for record in checked_records),
        "reuse": dict(Counter(record.get("reuse", "?") for record in checked_records)),
        "with NaN and Inf": sum(record["seed"] % 3 == 0 for record in checked_records),
        "runs of each kernel": 1 + repeats(),
        "wrong": [record for record in checked_records if record["wrong"]],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--graphs", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="number of the first graph")
    parser.add_argument("--limit", type=float, default=150, help="seconds")
    parser.add_argument("--workers", type=int, default=12, help="processes for each GPU")


def main(options: argparse.Namespace) -> None:
    check_graphs(options, check_graph, summary)


def check_graphs(
    options: argparse.Namespace,
    check_graph: Callable[[int], dict[str, Any]],
    summarize: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Check the graphs of the options, save each result, and exit with code 1 on any failure.

    ``check_graph`` checks the graph of a seed; ``summarize`` makes the counts of all records.
    """
    deadline = time.monotonic() + options.limit
    previous = json.loads(options.out.read_text()) if options.out.exists() else {}
    records: dict[str, Any] = previous.get("done", {})
    wanted = range(options.first, options.first + options.graphs)
    seeds = [seed for seed in wanted if str(seed) not in records]

    def store(record: dict[str, Any]) -> None:
        records[str(record["seed"])] = record
        body = {
            "how": "compiled" if on_gpu() else "interpreted",
            **_machine(),
            **summarize(records),
        }
        save(options.out, **body, done=records)
        result = "; ".join(record["wrong"]) or "right" if record["plan"] else "no such plan"
        print(f"{record['seed']}: {record['plan']}: {result[:160]}", flush=True)

    if on_gpu():
        gpus = [gpu for gpu in visible_gpus() for _ in range(options.workers)]
        queues = [seeds[at :: len(gpus)] for at in range(len(gpus))]
        for answer in run_jobs(check_graph, queues, gpus, deadline, lambda _: EXPECTED_SECONDS):
            crashed = {"seed": answer.job, "plan": "?", "wrong": [str(answer.error)]}
            store(answer.result or crashed)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
        prepare()
        for seed in seeds:
            if time.monotonic() < deadline:
                store(check_graph(seed))
    counts = summarize(records)
    missing = sum(str(seed) not in records for seed in wanted)
    print(
        f"{counts['kernels']} kernels, {len(counts['wrong'])} wrong; {missing} graphs were not run"
    )
    sys.exit(bool(counts["wrong"] or missing))


def _machine() -> dict[str, Any]:
    floats, others = dtypes()
    gpu = torch.cuda.get_device_name() if on_gpu() else None
    return {"gpu": gpu, "torch": torch.__version__, "floats": floats, "others": others}
