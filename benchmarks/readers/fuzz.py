"""Count what nostall's commands do with damaged files: exit codes, slowest file, peak memory.

python -m benchmarks run readers.fuzz --inputs 20000 --out benchmarks/readers/results/fuzz.json

Each input is read by a process of its own through the command line.  The exit code is 1 if one of
them ends with another exit code than 0 to 3, with a traceback, by a signal, after 20 s, with more
than 2 GB, or with invalid output.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.command_line import MEMORY, SECONDS, run_separately
from tests.fuzz.readers import READERS
from tests.fuzz.report import Report

from benchmarks.harness.result_file import save

_BATCH = 2500


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(READERS)
    parser.add_argument("--inputs", type=int, default=20_000, help="inputs for each reader")
    parser.add_argument("--reader", action="append", choices=tuple(READERS), help=f"of {names}")
    parser.add_argument("--seed", type=int, default=0, help="the first input's seed")
    parser.add_argument("--processes", type=int, default=2, help="batches that run at a time")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    names = options.reader or list(READERS)
    seeds = range(options.seed, options.seed + options.inputs)
    with ThreadPoolExecutor(options.processes) as pool:  # each thread waits for a child process
        parts = {name: pool.submit(_run_inputs, name, seeds) for name in names}
    results = {name: part.result() for name, part in parts.items()}
    save(
        options.out,
        inputs=sum(part["inputs"] for part in results.values()),
        first_seed=options.seed,
        limits={"seconds": SECONDS, "extra_address_space_mib": MEMORY >> 20},
        readers=results,
    )
    sys.exit(any(part["failures_count"] for part in results.values()))


def _run_inputs(name: str, seeds: range) -> dict[str, Any]:
    total, start = Report(), time.monotonic()
    for first in range(seeds.start, seeds.stop, _BATCH):
        batch = range(first, min(first + _BATCH, seeds.stop))
        total.add(run_separately([name], batch)[name])
        done = sum(total.outcomes.values())
        print(f"{name}: {done} of {len(seeds)}, {len(total.failures)} failures", flush=True)
    return {
        "inputs": len(seeds),
        "seconds": round(time.monotonic() - start, 1),
        **total.as_json(),
    }
