"""Count what nostall's commands do with damaged files: exit codes, slowest file, peak memory.

python -m benchmarks run readers.fuzz --inputs 10000 --out benchmarks/readers/results/fuzz

Each input is read through the command line.  ``--out`` is a folder, and each reader has a result
file there, which is written anew after each thousand inputs.  The exit code is 1 if an input ends
with another exit code than 0 to 3, with a traceback, by a signal, after 20 s, with more than 2 GB,
or with invalid output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.fuzz.command_line import run_separately
from tests.fuzz.commands_process import MEMORY, SECONDS
from tests.fuzz.readers import READERS
from tests.fuzz.report import Report

from benchmarks.harness.result_file import save

_BATCH = 1000
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
    reports = {name: Report() for name in options.reader or READERS}
    for first in range(seeds.start, seeds.stop, _BATCH):
        batch = range(first, min(first + _BATCH, seeds.stop))
        for name, report in reports.items():
            report.add(run_separately(name, batch))
            done = range(seeds.start, batch.stop)
            _save(name, report, done, options.out)
            print(
                f"{name}: {len(done)} of {len(seeds)}, {len(report.failures)} failures", flush=True
            )
    sys.exit(any(report.failures for report in reports.values()))


def _save(name: str, report: Report, seeds: range, out: Path) -> None:
    """Write the result file of a reader after the inputs of ``seeds``."""
    save(
        out / f"{name}.json",
        reader=name,
        inputs=len(seeds),
        first_seed=seeds.start,
        limits={"seconds": SECONDS, "extra_address_space_mib": MEMORY >> 20},
        **report.as_json(),
    )
