"""Measured gains of the assembler search on the suite's kernels, beside other methods.

    python -m benchmarks run ptx.assembler_suite --baseline compiler_baseline.json \\
        --seconds-per-kernel 45 --kernels "gemm*" --methods assembler anneal --budget-s 540 \\
        --out assembler_suite.json

Each (kernel, method, seed) is one record, written when it is done; a second run measures only
missing ones.  ``--suite unseen`` has kernels that the search was not developed with.  Two baselines
are measured in the same call: (a) the fastest compiler configuration, timed anew from the best of
the committed ones, or from all of a kernel without these; (b) the same with names, register
budgets, options and versions of ptxas tried as well, in the original order.  A ratio over (b) is
that of the order alone.  A method that fails leaves its traceback in ``failures``, and the next one
runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import repeat
from math import exp, log
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.harness.schema import Configuration, Options
from benchmarks.kernels.suite import Entry, entries
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.assembler_cell import METHODS, Baseline, Cell, measure
from benchmarks.sass.build_comparison import ProcessTimer, time_builds
from benchmarks.sass.compiler_baseline import load as load_baselines
from benchmarks.sass.compiler_baseline import try_build
from nostall.tuning.sources.source import Source

OVERHEAD = 25.0
"""Expected seconds of a record beyond its search: races, comparisons and processes."""
_COMPILERS = 8
"""Processes that compile the baselines, at most."""


@dataclass(frozen=True)
class Plan:
    """What a call measures."""

    entries: tuple[Entry, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    seconds: float
    until: float
    """End of the call, of the monotonic clock."""
    out: Path
    spike: Path | None
    configurations: int
    """Committed configurations of a kernel that are timed anew."""
    workers: int | None


class ResultFile:
    """The JSON of a call; what an earlier call measured stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        body = json.loads(path.read_text()) if path.exists() else {}
        self.records: list[dict[str, Any]] = body.get("records", [])
        self.failures: list[dict[str, Any]] = body.get("failures", [])

    @property
    def done(self) -> set[tuple[str, str, int]]:
        """Keys of the records."""
        return {(r["kernel"], r["method"], r["seed"]) for r in self.records}

    def add(self, record: dict[str, Any]) -> None:
        """Add a record and write the file."""
        self.records.append(record)
        self.save()

    def fail(self, cell: Cell, error: BaseException) -> None:
        """Add a failure with its traceback and write the file."""
        trace = "".join(traceback.format_exception(error))[-4000:]
        kernel, method, seed = cell.key
        self.failures.append({"kernel": kernel, "method": method, "seed": seed, "error": trace})
        self.save()

    def save(self) -> None:
        """Write the file."""
        save(self.path, kind="measured", records=self.records, failures=self.failures)


def run(plan: Plan, committed: dict[str, tuple[Configuration, ...]]) -> ResultFile:
    """Measure what is missing until the time is up."""
    results = ResultFile(plan.out)
    wanted = [e for e in plan.entries if any(key not in results.done for key in _keys(plan, e))]
    with ProcessPoolExecutor(
        min(_COMPILERS, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as compilers:
        built = {
            entry.name: compilers.map(
                try_build, repeat(entry), tried_options(committed, entry, plan.configurations)
            )
            for entry in wanted
        }
        for entry in wanted:
            if monotonic() + plan.seconds + OVERHEAD > plan.until:
                print(f"{entry.name}: no time left", flush=True)
                continue
            try:
                baseline = fastest_build(list(built[entry.name]))
            except Exception as error:  # a kernel that does not compile must not end the call
                results.fail(Cell(entry.name, "baseline", 0, 0.0), error)
                print(f"{entry.name}: no baseline: {error!r}"[:300], flush=True)
                continue
            for cell in missing_cells(plan, entry, results.done):
                measure_cell(cell, baseline, plan, results)
    return results


def missing_cells(plan: Plan, entry: Entry, done: set[tuple[str, str, int]]) -> Iterator[Cell]:
    """The cells of a kernel that have no record."""
    for seed in plan.seeds:
        for method in plan.methods:
            cell = Cell(
                entry.name,
                method,
                seed,
                plan.seconds,
                checks=6 if entry.size == "filling" else 16,
                spike=plan.spike,
                workers=plan.workers,
            )
            if cell.key not in done:
                yield cell


def measure_cell(cell: Cell, baseline: Baseline, plan: Plan, results: ResultFile) -> None:
    """Measure one cell, if there is time, and print its line."""
    if monotonic() + cell.seconds + OVERHEAD > plan.until:
        print(f"{cell.key}: no time left", flush=True)
        return
    try:
        record = measure(cell, baseline)
    except Exception as error:  # the next cell may still work
        results.fail(cell, error)
        print(f"{cell.key}: failed: {error!r}"[:400], flush=True)
        return
    results.add(record)
    print(summary_line(record), flush=True)


def tried_options(
    committed: dict[str, tuple[Configuration, ...]], entry: Entry, count: int
) -> list[Options | None]:
    """The options of the builds that baseline (a) times; [None] for a file that is not compiled.

    A kernel without committed configurations has all of its own.
    """
    if not entry.options:
        return [None]
    return [*(best_options(committed, entry, count) or entry.options)]


def best_options(
    committed: dict[str, tuple[Configuration, ...]], entry: Entry, count: int
) -> list[Options]:
    """The committed configurations with the smallest times."""
    ran = [c for c in committed.get(entry.name, ()) if c.us is not None]
    return [c.options for c in sorted(ran, key=lambda c: c.us or 0.0)[:count]]


def fastest_build(built: Sequence[Source | str], timer: ProcessTimer | None = None) -> Baseline:
    """The fastest of several builds on this GPU; raises ValueError if none compiled.

    ``timer``: a timer that stays open (None: one for this call).
    """
    sources = [source for source in built if isinstance(source, Source)]
    if not sources:
        raise ValueError("; ".join(map(str, built)) or "no configuration is committed")
    if len(sources) == 1:
        return Baseline(sources[0], ())
    if timer is None:
        with ProcessTimer() as own:
            times = time_builds(sources, own)
    else:
        times = time_builds(sources, timer)
    ran = [(us, n) for n, us in enumerate(times) if isinstance(us, float)]
    if not ran:
        raise ValueError("; ".join(map(str, times)))
    listed = tuple(
        {"options": source.provenance.get("options", ""), "time": us}
        for source, us in zip(sources, times, strict=True)
    )
    return Baseline(sources[min(ran)[1]], listed)


def _keys(plan: Plan, entry: Entry) -> Iterator[tuple[str, str, int]]:
    return ((entry.name, method, seed) for method in plan.methods for seed in plan.seeds)


def summary_line(record: dict[str, Any]) -> str:
    """A record in one line."""
    best = _interval(record["over_a"])
    portfolio = f"  b {_interval(record['portfolio'])}" if record.get("portfolio") else ""
    order = f"  order {_interval(record['over_b'])}" if record.get("over_b") else ""
    counts = record.get("counts", {})
    search = record.get("search", {})
    idle = search.get("idle_share")
    return (
        f"{record['kernel']:38} {record['method']:9} s{record['seed']} "
        f"{record['original_us']:8.2f} us  {best}{portfolio}{order}  "
        f"{sum(counts.values())} candidates {counts}"
        f"{f', idle {idle:.0%}' if idle is not None else ''} in {record['seconds']:.0f} s"
    )


def _interval(comparison: dict[str, Any] | None) -> str:
    if comparison is None:
        return "not timed"
    mark = "*" if comparison["verdict"] == "faster" else " "
    return (
        f"{comparison['ratio']:.4f}{mark}[{comparison['low']:.4f}, {comparison['high']:.4f}] "
        f"null [{comparison['null_low']:.4f}, {comparison['null_high']:.4f}]"
    )


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """The result in a few lines: each record, then the means of each method."""
    lines = [f"{'kernel':38} {'method':9} {'over a':>8} {'deployed':>8} {'b':>8} {'over b':>8}"]
    for r in sorted(records, key=lambda r: (r["kernel"], r["method"], r["seed"])):
        cells = [_ratio(r["over_a"]), r["deployed"], _ratio(r.get("portfolio"))]
        cells.append(_ratio(r.get("over_b")))
        shown = " ".join(f"{c:8.4f}" if c else f"{'-':>8}" for c in cells)
        lines.append(f"{r['kernel']:38} {r['method']:9} {shown}")
    for method in dict.fromkeys(r["method"] for r in records):
        deployed = [r["deployed"] for r in records if r["method"] == method]
        over_b = [r["over_b"] for r in records if r["method"] == method and r.get("over_b")]
        parts = [f"{method}: deployed {_mean(deployed):.4f} over {len(deployed)} records"]
        if over_b:
            won = [c["ratio"] if c["verdict"] == "faster" else 1.0 for c in over_b]
            parts.append(f"order alone, deployed {_mean(won):.4f}")
        lines.append("geometric mean, " + ", ".join(parts))
    return lines


def _ratio(comparison: dict[str, Any] | None) -> float | None:
    return None if comparison is None else float(comparison["ratio"])


def _mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


SUITES: Mapping[str, Callable[[], tuple[Entry, ...]]] = {
    "published": entries,
    "unseen": unseen_entries,
}
"""Suites by name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--suite", choices=tuple(SUITES), default="published", help="default: published"
    )
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--seconds-per-kernel", type=float, default=60.0, help="of each search")
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--size", choices=("published", "filling"), help="only this size")
    parser.add_argument("--methods", nargs="*", default=["assembler"], choices=tuple(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--budget-s", type=float, default=540.0, help="end after so many seconds")
    parser.add_argument("--configurations", type=int, default=3, help="timed anew for baseline (a)")
    parser.add_argument(
        "--spike", type=Path, help="folder with gpu_portfolio.py, for --methods spike"
    )
    parser.add_argument("--workers", type=int, help="processes that assemble; default: all cores")


def main(options: argparse.Namespace) -> None:
    suite = tuple(
        entry
        for entry in SUITES[options.suite]()
        if (entry.options or entry.file.suffix == ".ptx")
        and (options.size is None or entry.size == options.size)
        and any(fnmatch(entry.name, pattern) for pattern in options.kernels)
        and not any(fnmatch(entry.name, pattern) for pattern in options.skip)
    )
    plan = Plan(
        suite,
        tuple(options.methods),
        tuple(options.seeds),
        options.seconds_per_kernel,
        monotonic() + options.budget_s,
        options.out,
        options.spike,
        options.configurations,
        options.workers,
    )
    results = run(plan, load_baselines(options.baseline))
    print("\n".join(table(results.records)))
    if results.failures:
        print(f"{len(results.failures)} failures; the last: {results.failures[-1]['error'][-600:]}")
