"""Functions of stitched kernels at every number of fp32, compared with fp64.

    python -m benchmarks run fusion.all_fp32_values --out OUT [--every 1] [--limit 120]

What is held: errors as the helpers say them, NaN where the number is NaN and nowhere else, no value
outside of the function's range.  ``--every``: of the 2^32 patterns of bits each so many-th one.
OUT is a JSON file; functions that are in it are left out.  Without a GPU kernels are interpreted,
whose exp and reciprocal are numpy's.  Exit code 1 where a function is wrong or was not run.
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
from torch import Tensor

from benchmarks.harness.gpu_pool import run_jobs, visible_gpus
from benchmarks.harness.result_file import save
from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.fusion.testing.triton_interpreter import prepare

PATTERNS, ROW = 2**32, 1024
AT_ONCE = 2**24
"""Numbers of one launch; in fp64 they and what is made of them take 1 GB."""
LEAST_NORMAL = 2.0**-126
SECONDS = 20.0
"""About how long one function takes at most."""


@dataclass(frozen=True)
class Function:
    """An operator, with 1 added or not; its exact value, its range, and the largest error allowed:
    of the value, or for sums with 1 at all."""

    op: str
    plus_one: bool
    exact: Callable[[Tensor], Tensor]
    least: float
    most: float
    allowed: float

    def graph(self, numbers: int) -> Graph:
        build = Builder()
        made = build(self.op, build.input((numbers // ROW, ROW)))
        return build.graph(build("add", made, build.constant(1.0)) if self.plus_one else made)


FUNCTIONS = {
    "sigmoid": Function("sigmoid", False, torch.sigmoid, 0.0, 1.0, 1e-5),
    "tanh": Function("tanh", False, torch.tanh, -1.0, 1.0, 1e-6),
    "erf": Function("erf", False, torch.erf, -1.0, 1.0, 6e-7),
    "1 + tanh": Function("tanh", True, lambda x: 2 * torch.sigmoid(2 * x), 0.0, 2.0, 5e-7),
    "1 + erf": Function("erf", True, lambda x: torch.special.erfc(-x), 0.0, 2.0, 6e-7),
}


def numbers(every: int, device: str) -> Iterator[Tensor]:
    """The patterns of bits as fp32, some at a time."""
    for first in range(0, PATTERNS, AT_ONCE * every):
        bits = torch.arange(first, min(first + AT_ONCE * every, PATTERNS), every, device=device)
        yield bits.to(torch.int32).view(torch.float32).view(-1, ROW)


def checked(job: tuple[str, int]) -> dict[str, Any]:
    """The largest errors of a function, and how many of its values are wrong at all."""
    name, every = job
    of, device = FUNCTIONS[name], "cuda" if torch.cuda.is_available() else "cpu"
    began, kernels = time.monotonic(), Counter[str]()
    relative = absolute = at_relative = at_absolute = 0.0
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        graph = of.graph(min(AT_ONCE, PATTERNS // every))
        program = emit(
            plan_kernel(
                schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (ROW,), 4)
            )
        )
        whole = StitchedGraph(graph, (load_kernel(program, Path(folder)),), Counter())
        for x in numbers(every, device):
            (got,) = whole(x)
            want, have = of.exact(x.double()), got.double()
            number = ~x.isnan()
            kernels["numbers"] += int(number.sum())
            kernels["NaN that is none, or none that is"] += int((have.isnan() == number).sum())
            kernels["outside of the range"] += int(((have < of.least) | (have > of.most)).sum())
            error = torch.where(number, (have - want).abs(), 0.0)
            of_value = torch.where(want.abs() >= LEAST_NORMAL, error / want.abs(), 0.0)
            absolute, at_absolute = max((absolute, at_absolute), _largest(error, x))
            relative, at_relative = max((relative, at_relative), _largest(of_value, x))
    largest = absolute if of.plus_one else relative
    strange = [text for text in kernels if text != "numbers" and kernels[text]]
    return {
        "function": name,
        **kernels,
        "largest error": absolute,
        "at": at_absolute,
        "largest error of the value": relative,
        "there at": at_relative,
        "allowed": of.allowed,
        "wrong": [*strange, *(["error"] if not largest <= of.allowed else [])],
        "seconds": round(time.monotonic() - began, 1),
    }


def _largest(error: Tensor, x: Tensor) -> tuple[float, float]:
    at = error.argmax()
    return float(error.view(-1)[at]), float(x.view(-1)[at])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="a power of two")
    parser.add_argument("--limit", type=float, default=120, help="seconds")


def main(options: argparse.Namespace) -> None:
    done = json.loads(options.out.read_text())["done"] if options.out.exists() else {}
    jobs = [(name, options.every) for name in FUNCTIONS if name not in done]
    gpus = visible_gpus()

    def keep(record: dict[str, Any]) -> None:
        done[record["function"]] = record
        save(options.out, gpu=_gpu(), every=options.every, done=done)
        errors = {key: record[key] for key in record if "error" in key}
        print(f"{record['function']}: {'; '.join(record['wrong']) or 'right'} {errors}", flush=True)

    if gpus:
        queues = [jobs[at :: len(gpus)] for at in range(len(gpus))]
        until = time.monotonic() + options.limit
        for answer in run_jobs(checked, queues, gpus, until, lambda _: SECONDS):
            keep(answer.result or {"function": answer.job[0], "wrong": [str(answer.error)]})
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported Triton before this
        prepare()
        for job in jobs:
            keep(checked(job))
    sys.exit(any(record["wrong"] for record in done.values()) or len(done) < len(FUNCTIONS))


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
