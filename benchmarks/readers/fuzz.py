"""Count what nostall's commands do with damaged files: exit codes, slowest file, peak memory.

python -m benchmarks run readers.fuzz --inputs 10000 --out benchmarks/readers/results/fuzz

Each input is read through the command line.  ``--out`` is a folder, and each reader has a result
file there.  The exit code is 1 if an input ends with another exit code than 0 to 3, with a
traceback, by a signal, after 20 s, with more than 2 GB, or with invalid output.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz.command_line import run_separately
from tests.fuzz.commands_process import MEMORY, SECONDS
from tests.fuzz.readers import READERS
from tests.fuzz.report import Report

from benchmarks.harness.result_file import save

_BATCH = 2500
"""Inputs that are read before the process that imported the commands is replaced."""


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(READERS)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs for each reader")
    parser.add_argument("--reader", action="append", choices=tuple(READERS), help=f"of {names}")
    parser.add_argument("--seed", type=int, default=0, help="the first input's seed")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")


def main(options: argparse.Namespace) -> None:
    seeds = range(options.seed, options.seed + options.inputs)
    options.out.mkdir(parents=True, exist_ok=True)
    failures = [_run_reader(name, seeds, options.out) for name in options.reader or READERS]
    sys.exit(any(failures))


def _run_reader(name: str, seeds: range, out: Path) -> int:
    """Run the inputs of one reader and write its result file; returns the number of failures."""
    total, start = Report(), time.monotonic()
    for first in range(seeds.start, seeds.stop, _BATCH):
        batch = range(first, min(first + _BATCH, seeds.stop))
        total.add(run_separately([name], batch)[name])
        done = sum(total.outcomes.values())
        print(f"{name}: {done} of {len(seeds)}, {len(total.failures)} failures", flush=True)
    save(
        out / f"{name}.json",
        reader=name,
        inputs=len(seeds),
        first_seed=seeds.start,
        limits={"seconds": SECONDS, "extra_address_space_mib": MEMORY >> 20},
        seconds=round(time.monotonic() - start, 1),
        **total.as_json(),
    )
    return len(total.failures)
