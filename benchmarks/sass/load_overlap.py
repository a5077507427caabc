"""What loading ahead is worth: searches and nulls with modules loaded while the GPU is timed.

    python -m benchmarks run sass.load_overlap --out gpu_overlap.json

For each kernel the same search runs for some seconds with and without loading ahead, in turns:
candidates per second, and the share of the time in loading, checking and timing.  Then the original
itself is evaluated as a candidate, again and again, while other modules are loaded ahead or are
not: its ratios to itself say whether loading disturbs the times.  One GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.suite import Entry, entries
from benchmarks.sass.compiler_baseline import fastest, is_selected, load
from benchmarks.sass.suite_cell import cached_build
from nostall.core import Budget
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan, Outcome
from nostall.sass import Program
from nostall.sass.schedule import Patcher, ScheduleSpace
from nostall.search import Anneal
from nostall.search.anneal import take_random_moves
from nostall.tuning.gpu_objective import GpuObjective
from nostall.tuning.source import Source

KERNELS = (
    "rmsnorm-512x512",
    "batched_gemm-4x512x512x2048@mma",
    "fused_attention-1x4x2048x64@mma",
)
REPETITIONS = 2
NULL_EVALUATIONS = 400
"""Evaluations of the original, each mode."""


@contextmanager
def open_device(source: Source, ahead: bool) -> Iterator[Any]:
    assert source.launch is not None
    with LocalGpu(
        Kernel(source.cubin, source.kernel, source.launch), MeasurementPlan(prefetch=ahead)
    ) as gpu:
        gpu.evaluate(source.cubin)
        yield gpu


def run_search(source: Source, space: ScheduleSpace, ahead: bool, seconds: float) -> dict[str, Any]:
    with open_device(source, ahead) as gpu:
        objective = GpuObjective(space, gpu)
        began = monotonic()
        found = Anneal().run(space, objective, Budget(seconds=seconds), seed=0)
        spent = monotonic() - began
        about = dict(gpu.info)
    return {
        "ahead": ahead,
        "per_second": round(found.evaluations / spent, 1),
        "shares": {
            part: round(value / spent, 4) for part, value in objective.phase_seconds.items()
        },
        "fates": dict(objective.outcome_counts),
        "gpu": about,
    }


def null_ratios(source: Source, space: ScheduleSpace, ahead: bool) -> list[float]:
    """Ratios of the original to itself, one for each evaluation; in between others are loaded."""
    patcher, rng = Patcher(space.program, space.function), np.random.default_rng(0)
    others = [patcher.patch(take_random_moves(space, space.start(), rng, 5)[0]) for _ in range(8)]
    ratios = []
    with open_device(source, ahead) as gpu:
        for number in range(NULL_EVALUATIONS):
            pending = gpu.start(source.cubin)
            pending.prefetch(others[number % 8])
            pending.prefetch(others[(number + 1) % 8])
            outcome: Outcome = pending.wait()
            if outcome.timing is not None:
                timing = outcome.timing
                pairs = np.asarray(timing.original) / np.asarray(timing.candidate)
                ratios.append(round(float(np.median(pairs)), 6))
    return ratios


def measure(entry: Entry, source: Source, seconds: float) -> dict[str, Any]:
    program = Program.from_cubin(source.cubin)
    space = ScheduleSpace(program, program.kernel(source.kernel))
    modes = [bool(turn % 2) for turn in range(2 * REPETITIONS)]
    run_search(source, space, False, 1.0)  # what a first search compiles is nobody's loss
    return {
        "kernel": entry.name,
        "searches": [run_search(source, space, ahead, seconds) for ahead in modes],
        "null_ratios": {str(mode): null_ratios(source, space, mode) for mode in (False, True)},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--kernel", nargs="*", default=KERNELS)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each search")


def main(options: argparse.Namespace) -> None:
    options.skip = []
    baselines, found = load(options.baseline), []
    for entry in entries():
        best = fastest(baselines.get(entry.name, ()))
        if best is None or not is_selected(entry.name, options):
            continue
        source = cached_build(entry, best.options)
        found.append(measure(entry, source, options.seconds))
        save(options.out, kind="measured", kernels=found)
        print(summary_line(found[-1]), flush=True)


def summary_line(row: dict[str, Any]) -> str:
    words = [f"{'ahead' if s['ahead'] else 'late'} {s['per_second']}/s" for s in row["searches"]]
    for mode, ratios in row["null_ratios"].items():
        with suppress(ValueError):
            low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95))
            words.append(f"null {mode} {middle:.5f} ({low:.4f}-{high:.4f})")
    return f"{row['kernel']}: {', '.join(words)}"
