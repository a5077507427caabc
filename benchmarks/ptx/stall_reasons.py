"""Stall reasons of kernels before and after the assembler search, counted by ncu.

    python -m benchmarks run ptx.stall_reasons --baseline compiler_baseline.json \\
        --winners assembler_suite.json --out stall_reasons.json

The original and the winner of each kernel, as ptxas makes it (without moves of native
instructions), are launched once each under ncu, without locked clocks or flushed caches.  A second
run computes only missing kernels.  Needs a GPU with readable performance counters.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from typing import Any

from benchmarks.harness.ncu import find_ncu
from benchmarks.harness.result_file import save
from benchmarks.kernels.suite import Entry
from benchmarks.ptx.assembler_suite import SUITES
from benchmarks.ptx.dependent_launch import read_winners
from benchmarks.ptx.dependent_launch_cell import ChainPlan, find_build
from benchmarks.sass.compiler_baseline import load as load_baselines
from benchmarks.sass.stall_reasons import profile_launch
from nostall.core.errors import NostallError
from nostall.gpu import Kernel
from nostall.ptx.assemble.builder import Builder
from nostall.tuning.assembler.candidate import build_state
from nostall.tuning.assembler.job import prepare

EXPECTED = 30.0
"""Seconds of one kernel, as far as is known."""


def count_both(ncu: str, entry: Entry, plan: ChainPlan) -> dict[str, Any]:
    """Counters of the original (``before``) and of the winner (``after``).

    Raises ValueError if the winner's build cannot be made here, or if ncu counts nothing.
    """
    _, source, best = find_build(entry, plan)
    if best is None:
        raise ValueError("this machine does not make the build of the winner's record")
    assert source.launch is not None
    builder = Builder(prepare(source)[1])
    try:
        cubin = build_state(builder, best).cubin
    finally:
        builder.close()
    original = Kernel(source.cubin, source.kernel, source.launch)
    return {
        "before": profile_launch(ncu, entry, original),
        "after": profile_launch(ncu, entry, replace(original, cubin=cubin)),
    }


def largest_changes(counters: dict[str, Any], count: int = 3) -> list[tuple[str, float, float]]:
    """(reason, cycles before, cycles after) of the reasons that changed most."""
    before, after = (counters[side]["waits"] for side in ("before", "after"))
    rows = [(why, before.get(why, 0.0), after.get(why, 0.0)) for why in {**before, **after}]
    return sorted(rows, key=lambda row: -abs(row[2] - row[1]))[:count]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", choices=tuple(SUITES), default="published")
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--winners", type=Path, required=True, help="result of ptx.assembler_suite")
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--budget-s", type=float, default=300.0, help="end after so many seconds")


def main(options: argparse.Namespace) -> int:
    ncu = find_ncu()
    if ncu is None:
        print("ncu is not on the PATH; it comes with Nsight Compute", file=sys.stderr)
        return 3
    until = monotonic() + options.budget_s
    winners, baselines = read_winners(options.winners), load_baselines(options.baseline)
    done = json.loads(options.out.read_text())["kernels"] if options.out.exists() else {}
    for entry in SUITES[options.suite]():
        is_wanted = any(fnmatch(entry.name, pattern) for pattern in options.kernels)
        is_done = "after" in done.get(entry.name, {})
        if entry.name not in winners or not is_wanted or is_done or monotonic() + EXPECTED > until:
            continue
        plan = ChainPlan(baselines.get(entry.name, ()), winners[entry.name], 0)
        try:
            done[entry.name] = count_both(ncu, entry, plan)
            print(entry.name, largest_changes(done[entry.name]), flush=True)
        except (ValueError, TimeoutExpired, NostallError) as error:
            done[entry.name] = {"failure": str(error)[:300]}
            print(entry.name, done[entry.name]["failure"], flush=True)
        save(options.out, kernels=done)
    return 0
