"""Random graphs of wide rows with plans that keep rows in shared memory, compared with fp64.

    python -m benchmarks run fusion.shared_memory_rows --out OUT --graphs 240 --limit 150 [--workers 12]

Every graph is a number: its operators, dtypes, rows and columns (1,100 to 57,000) follow from it,
and so do the plan (chunks, warps, how much is demoted, whether rows are copied ahead, or peeled)
and how buffers share memory.  One in ``LABELLED`` is a cross-entropy with two labels in each row,
anywhere in it or beside it.  Tensors lie between guard bands, a third of the graphs get NaN, Inf
and -0.0; the kernel runs ``REPEATS`` times and has to give the same bits each time, as threads that
race would not.  Several workers share each GPU, because compiling is what takes time; a fault ends
its worker only.  OUT is a JSON file; graphs that are in it are left out.  Without a GPU kernels are
interpreted (fp32 and fp16, one worker).
Exit code 1 where a kernel was wrong or fewer graphs ran than asked for.
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
from tests.unit.fusion.codegen.label_columns import two_label_gradient
from tests.unit.fusion.codegen.wide_rows import wide_rows

from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.on_chip import MAX_SHARED_BYTES, rematerialization_options
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.codegen.tiling.shared_memory import Reuse
from nostall.fusion.graph.graph import Graph
from nostall.fusion.testing.triton_interpreter import prepare

FLOATS = ("float32", "float16")
OTHERS = ("int32", "int64", "int16", "int8", "uint8")
ONLY_COMPILED = (("bfloat16",), ("float8_e4m3fn", "float8_e5m2"))
"""Floats and others that the interpreter gets wrong."""
COLUMNS = (
    *(1100, 2048, 2500, 4096, 5000, 8192, 12288, 16384, 32000, 33000, 57000),
    *(2501, 4099, 9213, 20001, 30522, 50257),
)
"""Of the last ones most rows begin at odd places, and a few are lanes of a chunk of their own."""
FEWER_COLUMNS, MANY_ROWS = 5000, 300
"""Of short rows there are many: blocks of all SMs run at once."""
LABELLED = 6
"""One graph of so many has labels."""
REPEATS, REPEATS_INTERPRETED = 20, 1
SECONDS = 12.0
"""About how long one graph takes at most."""


@functools.cache
def on_gpu() -> bool:
    """Asked late: a worker knows which GPU it has only once it runs."""
    return torch.cuda.is_available()


def dtypes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Floats, and what is cast to one."""
    more = ONLY_COMPILED if on_gpu() else ((), ())
    return FLOATS + more[0], OTHERS + more[1]


def repeats() -> int:
    return REPEATS if on_gpu() else REPEATS_INTERPRETED


def drawn(seed: int) -> tuple[Graph, Schedule, KernelPlan, Reuse] | None:
    """The graph of a number, and how it runs; None where it keeps nothing, or where no plan that
    may be drawn fits."""
    draw = random.Random(seed)
    columns = draw.choice(COLUMNS)
    rows = MANY_ROWS if on_gpu() and columns <= FEWER_COLUMNS else 5
    if seed % LABELLED == 1:
        graph = two_label_gradient((rows, columns), draw.choice(dtypes()[0]))
    else:
        graph = wide_rows(seed, columns, *dtypes(), rows)
    of = schedule_operators(graph, graph.operators)
    legal = [plan for plan in plans(of).legal_plans if plan.scheme == "shared"]
    if not legal:
        return None
    for told in ("peeled", "async_copies", "rematerialized"):  # what is rare is not rare here
        chosen = draw.choice(sorted({getattr(plan, told) for plan in legal}))
        legal = [plan for plan in legal if getattr(plan, told) == chosen]
    plan = draw.choice(legal)
    # What is legal is so with buffers that share memory; without, they may not fit.
    return graph, of, plan, draw.choice(get_args(Reuse)) if _fits(of, plan) else "order"


def _fits(of: Schedule, plan: KernelPlan) -> bool:
    kept = rematerialization_options(of, plan.async_copies, plan.peeled)[plan.rematerialized]
    return kept.arena(plan.chunks[0], "none").total_bytes <= MAX_SHARED_BYTES


def checked(seed: int) -> dict[str, Any]:
    """What became of one graph.  A fault of the GPU ends the process: nothing works after it."""
    torch.set_num_threads(1)  # workers are as many as processors
    made = drawn(seed)
    if made is None:
        return {"seed": seed, "plan": None}
    graph, of, plan, reuse = made
    began = time.monotonic()
    program = emit_shared(plan_kernel(of, plan), reuse)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        whole = StitchedGraph(graph, (load_kernel(program, Path(folder)),), Counter())
        found = wrong(whole, seed, _labels(seed) if seed % LABELLED == 1 else None)
    record = {"seed": seed, "plan": str(plan), "reuse": reuse, "shape": list(_shape(graph))}
    record |= {"wrong": found, "seconds": round(time.monotonic() - began, 1)}
    return record | ({"graph": str(graph)} if found else {})


def _labels(seed: int) -> Callable[[list[torch.Tensor]], None]:
    """Puts labels where the columns are, and a few beside them, into the inputs of a graph."""

    def change(inputs: list[torch.Tensor]) -> None:
        x, *labels = inputs
        random = torch.Generator().manual_seed(seed)
        for label in labels:
            label.copy_(torch.randint(-3, x.shape[1] + 3, label.shape, generator=random))

    return change


def wrong(
    whole: StitchedGraph, seed: int, change: Callable[[list[torch.Tensor]], None] | None = None
) -> list[str]:
    """What is wrong with the kernels of a graph, each run several times; ``change`` the inputs."""
    inputs = random_inputs(whole.graph, seed, "cuda" if on_gpu() else "cpu")
    if change:
        change(inputs)
    try:
        first = with_guard_bands(whole)(*inputs)
        found = find_value_errors(whole, inputs, first)
        for _ in range(repeats()):
            again = whole(*inputs)
            same = (torch.equal(_bits(a), _bits(b)) for a, b in zip(first, again, strict=True))
            if not all(same):
                return [*found, "other bits in another run"]
        return found
    except OutOfBoundsWrite as stray:
        return [str(stray)]
    except Exception as error:  # a kernel that cannot be compiled or run is a wrong one
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
    ran = [record for record in records if record["plan"]]
    return {
        "graphs": len(records),
        "graphs that keep nothing or too much": len(records) - len(ran),
        "kernels": len(ran),
        "copied ahead": sum("copied ahead" in record["plan"] for record in ran),
        "peeled": sum("peeled" in record["plan"] for record in ran),
        "with labels": sum(record["seed"] % LABELLED == 1 for record in ran),
        "reuse": dict(Counter(record.get("reuse", "?") for record in ran)),
        "with NaN and Inf": sum(record["seed"] % 3 == 0 for record in ran),
        "runs of each kernel": 1 + repeats(),
        "wrong": [record for record in ran if record["wrong"]],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--graphs", type=int, default=240)
    parser.add_argument("--first", type=int, default=0, help="the first graph's number")
    parser.add_argument("--limit", type=float, default=150, help="seconds")
    parser.add_argument("--workers", type=int, default=12, help="processes for each GPU")


def main(options: argparse.Namespace) -> None:
    check_graphs(options, checked, summary)


def check_graphs(
    options: argparse.Namespace,
    checked: Callable[[int], dict[str, Any]],
    summary: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Check the graphs that the options ask for, and save the result of each."""
    until = time.monotonic() + options.limit
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    done: dict[str, Any] = known.get("done", {})
    wanted = range(options.first, options.first + options.graphs)
    seeds = [seed for seed in wanted if str(seed) not in done]

    def keep(record: dict[str, Any]) -> None:
        done[str(record["seed"])] = record
        body = {"how": "compiled" if on_gpu() else "interpreted", **_machine(), **summary(done)}
        save(options.out, **body, done=done)
        result = "; ".join(record["wrong"]) or "right" if record["plan"] else "no such plan"
        print(f"{record['seed']}: {record['plan']}: {result[:160]}", flush=True)

    if on_gpu():
        gpus = [gpu for gpu in visible_gpus() for _ in range(options.workers)]
        queues = [seeds[at :: len(gpus)] for at in range(len(gpus))]
        for answer in run_jobs(checked, queues, gpus, until, lambda _: SECONDS):
            failed = {"seed": answer.job, "plan": "?", "wrong": [str(answer.error)]}
            keep(answer.result or failed)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported Triton before this
        prepare()
        for seed in seeds:
            if time.monotonic() < until:
                keep(checked(seed))
    found = summary(done)
    left = sum(str(seed) not in done for seed in wanted)
    print(f"{found['kernels']} kernels, {len(found['wrong'])} wrong; {left} graphs left")
    sys.exit(bool(found["wrong"] or left))


def _machine() -> dict[str, Any]:
    floats, others = dtypes()
    gpu = torch.cuda.get_device_name() if on_gpu() else None
    return {"gpu": gpu, "torch": torch.__version__, "floats": floats, "others": others}
