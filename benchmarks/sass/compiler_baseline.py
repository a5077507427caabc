"""The compiler's own best, before any search: tiles, warps, stages and registers of each kernel.

    python -m benchmarks run sass.compiler_baseline --out gpu_baseline.json

Every Triton kernel of the suite is compiled with 24 to 30 sets of options (side by side on the
processor's cores) and timed; :mod:`benchmarks.sass.suite` starts from the fastest.  Builds with the
same bytes are timed once.  Spreads over all visible GPUs; a second run does only the kernels that
are missing.
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
from benchmarks.sass.build_comparison import Referee, Times, race
from nostall.core import NostallError
from nostall.core.files import write_atomically
from nostall.tuning.source import Source

EXPECTED = 40.0
"""Seconds that a kernel may take, first compilation in a cold process included."""

Built = Source | str


@dataclass(frozen=True)
class Sweep:
    """One kernel to try, and how many processes may compile it."""

    entry: Entry
    cores: int


def sweep(
    tried: Sequence[Options], built: Sequence[Built], times: Times
) -> tuple[Configuration, ...]:
    """Each set of options with its time, or with why there is none.

    ``built``: what each compiled to, or why it did not.
    """
    different: dict[object, Source] = {_identity(s): s for s in built if isinstance(s, Source)}
    raced = dict(zip(different, race(list(different.values()), times), strict=True))
    found = []
    for options, source in zip(tried, built, strict=True):
        said = raced[_identity(source)] if isinstance(source, Source) else source
        us, failure = (said, "") if isinstance(said, float) else (None, said)
        found.append(Configuration(**options.model_dump(), us=us, failure=failure))
    return tuple(found)


def fastest(configurations: Sequence[Configuration]) -> Configuration | None:
    """The one with the least time; the first of equals, None when none ran."""
    ran = [c for c in configurations if c.us is not None]
    return min(ran, key=lambda c: c.us or 0.0, default=None)


def load(path: Path) -> dict[str, tuple[Configuration, ...]]:
    """The baselines of a file, by kernel."""
    kernels = json.loads(path.read_text())["kernels"]
    return {name: tuple(map(Configuration.model_validate, kernels[name])) for name in kernels}


def build_or_say(entry: Entry, options: Options) -> Built:
    """A build, or one line that says why there is none."""
    try:
        return build(entry, options)
    except NostallError as error:
        return " ".join(str(error).split())[:200]


def try_all(job: Sweep) -> tuple[Configuration, ...]:
    """In the process of one GPU: compile and time all configurations of one kernel."""
    options = job.entry.options
    built = list(_compilers(job.cores).map(build_or_say, repeat(job.entry), options))
    with Referee() as times:
        return sweep(options, built, times)


@cache
def _compilers(cores: int) -> ProcessPoolExecutor:
    """Kept for all kernels of this process: Triton takes seconds to import."""
    return ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn"))


def _identity(source: Source) -> object:
    assert source.launch is not None
    return source.cubin, source.launch.grid, source.launch.block, source.launch.shared


def _line(name: str, found: Sequence[Configuration]) -> str:
    best = fastest(found)
    if best is None:
        return f"{name:40} none of {len(found)} configurations ran: {found[0].failure}"
    ran = [c.us for c in found if c.us is not None]
    return (
        f"{name:40} {best.us:9.2f} us: tile {best.tile}, {best.num_warps} warps, "
        f"{best.num_stages} stages, registers {best.maxnreg}; "
        f"{len(ran)} of {len(found)} ran, slowest {max(ran):.2f} us"
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
    found = gpu_pool.visible_gpus()
    if not found:
        raise SystemExit("no GPU is visible; `nostall doctor` shows what is there")
    cores = max(1, len(os.sched_getaffinity(0)) // len(found) - 1)
    suite = entries()
    jobs = [
        Sweep(entry, cores)
        for entry in suite
        if entry.options and entry.name not in kernels and wanted(entry.name, options)
    ]
    names = [entry.name for entry in suite]
    queues = gpu_pool.assign_queues(jobs, len(found), lambda job: job.entry.name, names)
    for answer in gpu_pool.run_jobs(try_all, queues, found, until, lambda _: EXPECTED):
        name = answer.job.entry.name
        if answer.result is None:
            print(f"{name}: {answer.error!r}", flush=True)
            continue
        print(_line(name, answer.result), flush=True)
        kernels[name] = [c.model_dump() for c in answer.result]
        body = {**head(), "kind": "measured", "kernels": kernels}
        write_atomically(options.out, (json.dumps(body, indent=1) + "\n").encode())
    missing = [job.entry.name for job in jobs if job.entry.name not in kernels]
    if missing:
        print(f"{len(missing)} kernels are left; run again for: {', '.join(missing)}")


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether ``--kernel`` and ``--skip`` leave this kernel in."""
    chosen = any(fnmatch(name, pattern) for pattern in options.kernel)
    return chosen and not any(fnmatch(name, pattern) for pattern in options.skip)
