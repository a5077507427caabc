"""Count how nostall handles damaged cubins: outcomes, slowest mutant, peak memory.

python -m benchmarks run sass.fuzz --own 100000 --tool 2000 --out benchmarks/sass/results/fuzz.json

``--own`` mutants go through nostall's parsers, ``--tool`` mutants also through nvdisasm and the
verifier. The exit code is 1 if anything but a documented error was raised.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.harness import MEMORY, OWN_SECONDS, TOOL_SECONDS, Report, run_limited

from benchmarks.harness.result_file import save

_MAX_FAILURES = 50
"""Failures that the result file lists."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--own", type=int, default=100_000, help="mutants for the parsers")
    parser.add_argument("--tool", type=int, default=2_000, help="mutants for nvdisasm, too")
    parser.add_argument("--seed", type=int, default=0, help="the first mutant's seed")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    first = options.seed
    with ThreadPoolExecutor(2) as pool:  # each thread waits for a child process
        parts = {
            "own": pool.submit(_run_mutants, "own", range(first, first + options.own), 5000),
            "tool": pool.submit(_run_mutants, "tool", range(first, first + options.tool), 100),
        }
    results = {name: part.result() for name, part in parts.items()}
    limits = {
        "own_seconds": OWN_SECONDS,
        "tool_seconds": TOOL_SECONDS,
        "extra_address_space_mib": MEMORY >> 20,
    }
    save(options.out, first_seed=first, limits=limits, **results)
    sys.exit(any(part["failures_count"] for part in results.values()))


def _run_mutants(target: str, seeds: range, size: int) -> dict[str, Any]:
    total, start = Report(), time.monotonic()
    for report in run_limited(target, seeds, size):
        total.add(report)
        done = sum(total.outcomes.values())
        print(f"{target}: {done} of {len(seeds)}, {len(total.failures)} failures", flush=True)
    return {
        "mutants": len(seeds),
        "seconds": round(time.monotonic() - start, 1),
        "outcomes": dict(total.outcomes.most_common()),
        "mutations": dict(total.kinds.most_common()),
        "failures_count": len(total.failures),
        "failures": total.failures[:_MAX_FAILURES],
        "slowest": total.slowest,
        "peak_rss_mib": round(total.peak_rss_mib, 1),
    }
