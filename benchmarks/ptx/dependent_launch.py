"""Gain of dependent launches in chains: one kernel launched again and again, back to back.

    python -m benchmarks run ptx.dependent_launch --baseline compiler_baseline.json \\
        --winners assembler_suite.json --budget-s 540 --out dependent_launch.json

All ratios are over the same chain of the compiler's cubin without the launch attribute: the best
order of an earlier search without the attribute (``order``), a wait that stands late in the
compiler's order (``wait``) and in the best order (``best``), and ``launch_pdl`` of Triton with
``gdc_wait`` as the first statement of the kernel (``triton``).  Each kernel takes about 15 seconds
and is written when it is done; a second run measures only missing ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from math import exp, log
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.kernels.suite import Entry
from benchmarks.ptx.assembler_suite import SUITES
from benchmarks.ptx.dependent_launch_cell import FIGURES, ChainPlan, measure_chain, prepare_chain
from benchmarks.sass.compiler_baseline import load as load_baselines

EXPECTED = 20.0
"""Seconds of one kernel, at most, as far as is known."""
_BUILDERS = 8
"""Processes that build the variants of the next kernels, at most."""


@dataclass
class ChainFile:
    """The JSON of a call; what an earlier call measured stays."""

    path: Path
    records: list[dict[str, Any]]
    failures: list[dict[str, Any]]

    @classmethod
    def open(cls, path: Path) -> ChainFile:
        """Read the file, if there is one."""
        body = json.loads(path.read_text()) if path.exists() else {}
        return cls(path, body.get("records", []), body.get("failures", []))

    def save(self) -> None:
        """Write the file."""
        save(self.path, kind="measured", records=self.records, failures=self.failures)


def read_winners(path: Path | None) -> dict[str, dict[str, Any]]:
    """Per kernel, the record of the search with the largest deployed gain."""
    winners: dict[str, dict[str, Any]] = {}
    for record in json.loads(path.read_text())["records"] if path is not None else []:
        if record["method"] != "assembler" or "recipe" not in record:
            continue
        known = winners.get(record["kernel"])
        if known is None or known["deployed"] < record["deployed"]:
            winners[record["kernel"]] = record
    return winners


def summary_line(record: dict[str, Any]) -> str:
    """A record in one line."""
    cells = [f"{name} {_ratio(record['figures'].get(name))}" for name in FIGURES]
    return (
        f"{record['kernel']:38} {record['chain_us']:8.2f} us  {'  '.join(cells)}  "
        f"({record['missing_wait']}, {record['seconds']:.0f} s)"
    )


def means(records: Sequence[dict[str, Any]]) -> list[str]:
    """Geometric means of the figures over the kernels that have them all."""
    full = [r["figures"] for r in records if all(r["figures"].get(name) for name in FIGURES)]
    if not full:
        return []
    parts = [
        f"{name} {exp(sum(log(f[name]['ratio']) for f in full) / len(full)):.4f}"
        for name in FIGURES
    ]
    return [f"geometric mean over {len(full)} kernels with all figures: {', '.join(parts)}"]


def _ratio(figure: dict[str, Any] | None) -> str:
    if not figure:
        return "-     "
    return f"{figure['ratio']:.4f}{'*' if figure['verdict'] == 'faster' else ' '}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", nargs="*", choices=tuple(SUITES), default=["published"])
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument(
        "--winners",
        nargs="*",
        type=Path,
        default=[],
        help="results of ptx.assembler_suite, for their orders",
    )
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="end after so many seconds")
    parser.add_argument("--rounds", type=int, default=100, help="samples of a comparison")


def main(options: argparse.Namespace) -> None:
    until = monotonic() + options.budget_s
    results = ChainFile.open(options.out)
    winners: dict[str, dict[str, Any]] = {}
    for path in options.winners:
        winners |= read_winners(path)
    committed = load_baselines(options.baseline)
    wanted = select_entries(options, {record["kernel"] for record in results.records})
    plans = [
        ChainPlan(committed.get(e.name, ()), winners.get(e.name), options.rounds) for e in wanted
    ]
    with ProcessPoolExecutor(
        min(_BUILDERS, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as builders:
        pending = [builders.submit(prepare_chain, e, p) for e, p in zip(wanted, plans, strict=True)]
        for entry, plan, future in zip(wanted, plans, pending, strict=True):
            if monotonic() + EXPECTED > until:
                print(f"{entry.name}: no time left", flush=True)
                future.cancel()
                continue
            try:
                results.records.append(measure_chain(future.result(), plan))
                print(summary_line(results.records[-1]), flush=True)
            except Exception as error:  # the next kernel may still work
                trace = "".join(traceback.format_exception(error))[-4000:]
                results.failures.append({"kernel": entry.name, "error": trace})
                print(f"{entry.name}: failed: {error!r}"[:400], flush=True)
            results.save()
    print("\n".join(means(results.records)))


def select_entries(options: argparse.Namespace, done: set[str]) -> list[Entry]:
    """The kernels of the suites that have PTX, match the patterns and have no record."""
    return [
        entry
        for name in options.suite
        for entry in SUITES[name]()
        if (entry.options or entry.file.suffix == ".ptx")
        and entry.name not in done
        and any(fnmatch(entry.name, pattern) for pattern in options.kernels)
        and not any(fnmatch(entry.name, pattern) for pattern in options.skip)
    ]
