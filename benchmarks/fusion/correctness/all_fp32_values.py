"""Check of functions in stitched kernels at every fp32 value, compared with fp64.

    python -m benchmarks run fusion.all_fp32_values --out OUT [--every 1] [--limit 120]

Errors must be within each function's tolerance, results must be NaN for NaN only, and within the
function's range.  ``--every N`` takes every N-th of the 2^32 bit patterns.  OUT is a JSON file;
functions that it has are skipped.  Without a GPU kernels run in Triton's interpreter, with numpy's
exp and reciprocal.  Exit code 1 if a function is wrong or was not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph

PATTERNS, ROW = 2**32, 1024
"""Number of fp32 bit patterns, and columns of the tensors."""
BATCH = 2**24
"""Values of one launch; with their fp64 references they take 1 GB."""
MIN_NORMAL = 2.0**-126
"""Smallest normal fp32 number; relative errors below it are not checked."""
EXPECTED_SECONDS = 20.0
"""Expected seconds of one function, at most."""


@dataclass(frozen=True)
class Function:
    """A function to be checked: an operator, optionally plus 1."""

    op: str
    plus_one: bool
    """Whether 1 is added to the operator's result."""
    exact: Callable[[Tensor], Tensor]
    """The reference, for fp64."""
    min_value: float
    max_value: float
    tolerance: float
    """Largest allowed relative error; with ``plus_one`` the largest absolute error."""

    def graph(self, fp32_batches: int) -> Graph:
        build = Builder()
        result = build(self.op, build.input((fp32_batches // ROW, ROW)))
        return build.graph(build("add", result, build.constant(1.0)) if self.plus_one else result)


FUNCTIONS = {
    "sigmoid": Function("sigmoid", False, torch.sigmoid, 0.0, 1.0, 1e-5),
    "tanh": Function("tanh", False, torch.tanh, -1.0, 1.0, 1e-6),
    "erf": Function("erf", False, torch.erf, -1.0, 1.0, 6e-7),
    "1 + tanh": Function("tanh", True, lambda x: 2 * torch.sigmoid(2 * x), 0.0, 2.0, 5e-7),
    "1 + erf": Function("erf", True, lambda x: torch.special.erfc(-x), 0.0, 2.0, 6e-7),
}


def fp32_batches(every: int, device: str) -> Iterator[Tensor]:
    """All bit patterns (every ``every``-th) as fp32 tensors of at most ``BATCH`` values."""
    for first in range(0, PATTERNS, BATCH * every):
        patterns = torch.arange(first, min(first + BATCH * every, PATTERNS), every, device=device)
        yield patterns.to(torch.int32).view(torch.float32).view(-1, ROW)


def check_function(job: tuple[str, int]) -> dict[str, Any]:
    """Largest errors of a function, and counts of wrong NaN and values outside of its range."""
    name, every = job
    function, device = FUNCTIONS[name], "cuda" if torch.cuda.is_available() else "cpu"
    start, counts = time.monotonic(), Counter[str]()
    relative = absolute = at_relative = at_absolute = 0.0
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        graph = function.graph(min(BATCH, PATTERNS // every))
        program = emit(
            plan_kernel(
                schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (ROW,), 4)
            )
        )
        stitched = StitchedGraph(graph, (load_kernel(program, Path(folder)),), Counter())
        for x in fp32_batches(every, device):
            (output,) = stitched(x)
            expected, actual = function.exact(x.double()), output.double()
            is_number = ~x.isnan()
            counts["numbers"] += int(is_number.sum())
            counts["NaN that is none, or none that is"] += int((actual.isnan() == is_number).sum())
            counts["outside of the range"] += int(
                ((actual < function.min_value) | (actual > function.max_value)).sum()
            )
            error = torch.where(is_number, (actual - expected).abs(), 0.0)
            relative_error = torch.where(expected.abs() >= MIN_NORMAL, error / expected.abs(), 0.0)
            absolute, at_absolute = max((absolute, at_absolute), _largest(error, x))
            relative, at_relative = max((relative, at_relative), _largest(relative_error, x))
    largest = absolute if function.plus_one else relative
    problems = [text for text in counts if text != "numbers" and counts[text]]
    return {
        "function": name,
        **counts,
        "largest error": absolute,
        "at": at_absolute,
        "largest error of the value": relative,
        "there at": at_relative,
        "allowed": function.tolerance,
        "wrong": [*problems, *(["error"] if not largest <= function.tolerance else [])],
        "seconds": round(time.monotonic() - start, 1),
    }


def _largest(error: Tensor, x: Tensor) -> tuple[float, float]:
    at = error.argmax()
    return float(error.view(-1)[at]), float(x.view(-1)[at])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--every", type=int, default=1, help="check every N-th bit pattern; a power of two"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds")


def main(options: argparse.Namespace) -> None:
    records = json.loads(options.out.read_text())["done"] if options.out.exists() else {}
    jobs = [(name, options.every) for name in FUNCTIONS if name not in records]
    gpus = visible_gpus()

    def store(record: dict[str, Any]) -> None:
        records[record["function"]] = record
        save(options.out, gpu=_gpu(), every=options.every, done=records)
        errors = {key: record[key] for key in record if "error" in key}
        print(f"{record['function']}: {'; '.join(record['wrong']) or 'right'} {errors}", flush=True)

    if gpus:
        queues = [jobs[at :: len(gpus)] for at in range(len(gpus))]
        deadline = time.monotonic() + options.limit
        for answer in run_jobs(check_function, queues, gpus, deadline, lambda _: EXPECTED_SECONDS):
            store(answer.result or {"function": answer.job[0], "wrong": [str(answer.error)]})
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
        prepare()
        for job in jobs:
            store(check_function(job))
    sys.exit(any(record["wrong"] for record in records.values()) or len(records) < len(FUNCTIONS))


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
