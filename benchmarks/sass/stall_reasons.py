"""Stall reasons of the suite's original kernels, counted by ncu.

    python -m benchmarks run sass.stall_reasons --baseline gpu_baseline.json --out gpu_reasons.json

The original is the configuration that :mod:`benchmarks.sass.suite` starts from. It is launched once
in a process of its own under ncu, without locked clocks or flushed caches. The file is written
after each kernel; a second run computes only missing or failed kernels. Needs a GPU with readable
performance counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import pickle
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from typing import Any

from benchmarks.harness.ncu import find_ncu, run_within
from benchmarks.harness.result_file import save
from benchmarks.kernels.suite import Entry, entries
from benchmarks.sass.compiler_baseline import fastest, is_selected
from benchmarks.sass.compiler_baseline import load as load_baselines
from benchmarks.sass.suite_cell import cached_build
from nostall.gpu import Kernel, MeasurementPlan

_SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats")
_STALL_METRIC = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "dram_percent": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "issued_per_cycle": ("smsp__issue_active.avg.per_cycle_active", 1.0),
}
_LIMIT = 60.0
"""Time limit of one kernel under ncu, in seconds."""


def parse_stall_reasons(lines: Sequence[str], errors: str) -> dict[str, Any]:
    """Counters of the single launch on ncu's raw page.

    ``waits``: cycles that a warp stalls between two of its instructions, by reason, largest first.
    Raises ValueError if ncu counted nothing.
    """
    rows = [line for line in lines if line.startswith('"')]
    table = list(csv.DictReader(io.StringIO("\n".join(rows))))
    names = [name for name in (table[0] if table else ()) if _STALL_METRIC.fullmatch(name)]
    if len(table) < 2 or not names:
        raise ValueError(f"ncu counted nothing: {' '.join([*lines[-3:], errors.strip()[-300:]])}")
    row = table[1]
    waits = {_reason_name(name): _number(row[name]) for name in names}
    counters: dict[str, Any] = {
        key: round(_number(row[name]) * scale, 4)
        for key, (name, scale) in _METRICS.items()
        if row.get(name)
    }
    ranked = sorted(waits.items(), key=lambda item: -item[1])
    counters["waits"] = {reason: round(cycles, 3) for reason, cycles in ranked if cycles}
    return counters


def profile_launch(ncu: str, entry: Entry, kernel: Kernel, limit: float = _LIMIT) -> dict[str, Any]:
    """Launch ``kernel`` once under ncu; returns its counters."""
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        file = Path(folder) / "kernel.pickle"
        file.write_bytes(pickle.dumps((kernel, kernel.cubin, MeasurementPlan(), 0)))
        command = [
            *(ncu, "--clock-control", "none", "--cache-control", "none", "--csv"),
            *("--page", "raw", "--print-units", "base", "--kernel-name", kernel.name),
            *(word for name in _SECTIONS for word in ("--section", name)),
            *(sys.executable, "-m", "nostall.gpu.sanitizer_target", str(file)),
        ]
        code, out, errors = run_within(command, limit)
    return {"exit_code": code, "size": entry.size, **parse_stall_reasons(out.splitlines(), errors)}


def _reason_name(name: str) -> str:
    match = _STALL_METRIC.fullmatch(name)
    assert match is not None
    return match[1]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--inductor", type=Path, help="made by benchmarks.kernels.inductor")
    parser.add_argument("--kernel", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--limit", type=float, default=300.0, help="stop after so many seconds")


def main(options: argparse.Namespace) -> int:
    ncu = find_ncu()
    if ncu is None:
        print("ncu is not on the PATH; it comes with Nsight Compute", file=sys.stderr)
        return 3
    until = monotonic() + options.limit
    baselines = load_baselines(options.baseline)
    done = json.loads(options.out.read_text())["kernels"] if options.out.exists() else {}
    for entry in entries(options.inductor):
        best = fastest(baselines.get(entry.name, ()))
        if (entry.options and best is None) or not is_selected(entry.name, options):
            continue
        if "waits" in done.get(entry.name, {}) or monotonic() > until:
            continue
        source = cached_build(entry, best)
        assert source.launch is not None
        try:
            counters = profile_launch(
                ncu, entry, Kernel(source.cubin, source.kernel, source.launch)
            )
        except (ValueError, TimeoutExpired) as error:
            counters = {"failure": str(error)[:300]}
        done[entry.name] = counters
        print(
            entry.name, counters.get("failure") or list(counters["waits"].items())[:3], flush=True
        )
        save(options.out, kernels=done)
    return 0
