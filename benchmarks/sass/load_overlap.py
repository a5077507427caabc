"""Candidates per second with modules loaded while the GPU is timing (prefetch) and without.

    python -m benchmarks run sass.load_overlap --baseline gpu_baseline.json --out gpu_overlap.json

For each kernel, the same search runs with and without prefetch, alternating: candidates per second,
and the share of the time in loading, checking and timing. Then the original is evaluated as a
candidate many times, with and without other modules being loaded: its ratios to itself show whether
loading disturbs the times. Uses one GPU.
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
from nostall.tuning.sources.source import Source

KERNELS = (
    "rmsnorm-512x512",
    "batched_gemm-4x512x512x2048@mma",
    "fused_attention-1x4x2048x64@mma",
)
REPETITIONS = 2
"""Searches with prefetch, and as many without."""
NULL_EVALUATIONS = 400
"""Evaluations of the original with prefetch, and as many without."""


@contextmanager
def open_device(source: Source, prefetch: bool) -> Iterator[Any]:
    """A GPU that has evaluated the original once, so that it is warm."""
    assert source.launch is not None
    with LocalGpu(
        Kernel(source.cubin, source.kernel, source.launch), MeasurementPlan(prefetch=prefetch)
    ) as gpu:
        gpu.evaluate(source.cubin)
        yield gpu


def run_search(
    source: Source, space: ScheduleSpace, prefetch: bool, seconds: float
) -> dict[str, Any]:
    """Run one search; returns its rate and the share of each phase."""
    with open_device(source, prefetch) as gpu:
        objective = GpuObjective(space, gpu)
        began = monotonic()
        result = Anneal().run(space, objective, Budget(seconds=seconds), seed=0)
        seconds_spent = monotonic() - began
        about = dict(gpu.info)
    return {
        "ahead": prefetch,
        "per_second": round(result.evaluations / seconds_spent, 1),
        "shares": {
            part: round(value / seconds_spent, 4) for part, value in objective.phase_seconds.items()
        },
        "fates": dict(objective.outcome_counts),
        "gpu": about,
    }


def null_ratios(source: Source, space: ScheduleSpace, prefetch: bool) -> list[float]:
    """Ratios of the original to itself, one an evaluation, while other modules are loaded."""
    patcher, rng = Patcher(space.program, space.function), np.random.default_rng(0)
    others = [patcher.patch(take_random_moves(space, space.start(), rng, 5)[0]) for _ in range(8)]
    ratios = []
    with open_device(source, prefetch) as gpu:
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
    """Searches and null ratios of one kernel, with and without prefetch."""
    program = Program.from_cubin(source.cubin)
    space = ScheduleSpace(program, program.kernel(source.kernel))
    modes = [bool(number % 2) for number in range(2 * REPETITIONS)]
    run_search(source, space, False, 1.0)  # numba compiles during the first search
    return {
        "kernel": entry.name,
        "searches": [run_search(source, space, prefetch, seconds) for prefetch in modes],
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
    baselines, rows = load(options.baseline), []
    for entry in entries():
        best = fastest(baselines.get(entry.name, ()))
        if best is None or not is_selected(entry.name, options):
            continue
        source = cached_build(entry, best.options)
        rows.append(measure(entry, source, options.seconds))
        save(options.out, kind="measured", kernels=rows)
        print(summary_line(rows[-1]), flush=True)


def summary_line(row: dict[str, Any]) -> str:
    """Rates and quantiles of the null ratios of one kernel, in one line."""
    words = [f"{'ahead' if s['ahead'] else 'late'} {s['per_second']}/s" for s in row["searches"]]
    for mode, ratios in row["null_ratios"].items():
        with suppress(ValueError):
            low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95))
            words.append(f"null {mode} {middle:.5f} ({low:.4f}-{high:.4f})")
    return f"{row['kernel']}: {', '.join(words)}"
