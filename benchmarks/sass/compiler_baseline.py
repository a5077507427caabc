"""Fastest compiler configuration of each kernel: tiles, warps, stages and registers.

    python -m benchmarks run sass.compiler_baseline --out gpu_baseline.json

Each Triton kernel of the suite is compiled with 24 to 30 sets of options (in parallel on the CPU
cores) and timed; :mod:`benchmarks.sass.suite` starts from the fastest. Builds with the same bytes
are timed once. Uses all visible GPUs. A second run computes only missing kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import repeat
from pathlib import Path
from time import monotonic

from benchmarks.harness import gpu_pool
from benchmarks.harness.result_file import head
from benchmarks.harness.schema import Configuration, Options
from benchmarks.kernels.suite import Entry, build, entries
from benchmarks.sass.build_comparison import BuildTimer, ProcessTimer, time_builds
from nostall.core import NostallError
from nostall.core.files.atomic import write_atomically
from nostall.tuning.sources.source import Source

EXPECTED = 40.0
"""Expected seconds for one kernel, with the first compilation in a new process."""

BuildResult = Source | str


@dataclass(frozen=True)
class SweepJob:
    """A job: compile and time all configurations of one kernel, with ``cores`` processes."""

    entry: Entry
    cores: int


def time_configurations(
    tried: Sequence[Options], built: Sequence[BuildResult], times: BuildTimer
) -> tuple[Configuration, ...]:
    """Time the builds of one kernel. Returns each set of options with its time or its failure.

    ``built``: the build of each of the options, or why compilation failed.
    """
    different: dict[object, Source] = {_identity(s): s for s in built if isinstance(s, Source)}
    results = dict(zip(different, time_builds(list(different.values()), times), strict=True))
    configurations = []
    for options, source in zip(tried, built, strict=True):
        result = results[_identity(source)] if isinstance(source, Source) else source
        us, failure = (result, "") if isinstance(result, float) else (None, result)
        configurations.append(Configuration(**options.model_dump(), us=us, failure=failure))
    return tuple(configurations)


def fastest(configurations: Sequence[Configuration]) -> Configuration | None:
    """The configuration with the smallest time (the first of equal ones); None if none ran."""
    ran = [c for c in configurations if c.us is not None]
    return min(ran, key=lambda c: c.us or 0.0, default=None)


def load(path: Path) -> dict[str, tuple[Configuration, ...]]:
    """Read the configurations of a baseline file, by kernel."""
    kernels = json.loads(path.read_text())["kernels"]
    return {name: tuple(map(Configuration.model_validate, kernels[name])) for name in kernels}


def try_build(entry: Entry, options: Options | None) -> BuildResult:
    """Compile a kernel, or read a compiled one; returns the build, or the error in one line."""
    try:
        return build(entry, options)
    except NostallError as error:
        return " ".join(str(error).split())[:200]


def run_sweep(job: SweepJob) -> tuple[Configuration, ...]:
    """Compile and time all configurations of one kernel; runs in the process of one GPU."""
    options = job.entry.options
    built = list(_compilers(job.cores).map(try_build, repeat(job.entry), options))
    with ProcessTimer() as times:
        return time_configurations(options, built, times)


@cache
def _compilers(cores: int) -> ProcessPoolExecutor:
    """Compiler processes, cached because Triton takes seconds to import."""
    return ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn"))


def _identity(source: Source) -> object:
    assert source.launch is not None
    return source.cubin, source.launch.grid, source.launch.block, source.launch.shared


def _summary_line(name: str, configurations: Sequence[Configuration]) -> str:
    best = fastest(configurations)
    if best is None:
        failure = configurations[0].failure
        return f"{name:40} none of {len(configurations)} configurations ran: {failure}"
    ran = [c.us for c in configurations if c.us is not None]
    return (
        f"{name:40} {best.us:9.2f} us: tile {best.tile}, {best.num_warps} warps, "
        f"{best.num_stages} stages, registers {best.maxnreg}; "
        f"{len(ran)} of {len(configurations)} ran, slowest {max(ran):.2f} us"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")


def main(options: argparse.Namespace) -> None:
    until, kernels = monotonic() + options.limit, dict[str, object]()
    if options.out.exists():
        kernels = json.loads(options.out.read_text())["kernels"]
    gpus = gpu_pool.visible_gpus()
    if not gpus:
        raise SystemExit("no GPU is visible; `nostall doctor` shows what is there")
    cores = max(1, len(os.sched_getaffinity(0)) // len(gpus) - 1)
    suite = entries()
    jobs = [
        SweepJob(entry, cores)
        for entry in suite
        if entry.options and entry.name not in kernels and is_selected(entry.name, options)
    ]
    names = [entry.name for entry in suite]
    queues = gpu_pool.assign_queues(jobs, len(gpus), lambda job: job.entry.name, names)
    for result in gpu_pool.run_jobs(run_sweep, queues, gpus, until, lambda _: EXPECTED):
        name = result.job.entry.name
        if result.result is None:
            print(f"{name}: {result.error!r}", flush=True)
            continue
        print(_summary_line(name, result.result), flush=True)
        kernels[name] = [c.model_dump() for c in result.result]
        body = {**head(), "kind": "measured", "kernels": kernels}
        write_atomically(options.out, (json.dumps(body, indent=1) + "\n").encode())
    missing = [job.entry.name for job in jobs if job.entry.name not in kernels]
    if missing:
        print(f"{len(missing)} kernels are left; run again for: {', '.join(missing)}")


def is_selected(name: str, options: argparse.Namespace) -> bool:
    """Whether a kernel matches ``--kernel`` and not ``--skip``."""
    matches = any(fnmatch(name, pattern) for pattern in options.kernel)
    return matches and not any(fnmatch(name, pattern) for pattern in options.skip)
