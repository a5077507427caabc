"""How many cycles do measured issue distances free in compiled kernels?  Needs no GPU.

    python -m benchmarks run sass.freed_slack --out benchmarks/sass/results/freed_slack.json

For each sm_90 kernel of the corpus, each stall is lowered to the least that is legal, in the
compiler's order: once with the distances of compiler output, once with those measured on a GPU.
Stall cycles are counted once for each instruction, however often it executes.  Kernels come in a
random order, so that a time limit leaves a sample.  A second run computes only kernels that are
missing or whose tables have changed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.sass.gpu_walks.walks import kernel_names, open_space
from nostall.sass.safety.verdict import rules_digest
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.mobility import lower_stalls


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--largest", type=int, default=120_000, help="bytes of the largest cubin")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the order of kernels")


def main(options: argparse.Namespace) -> None:
    began = monotonic()
    rules = rules_digest()[:16]
    done: dict[str, Any] = {}
    if options.out.is_file():
        earlier = json.loads(options.out.read_text())
        done = earlier["kernels"] if earlier["rules"] == rules else {}
    rows = dict(done)
    names = kernel_names(options.largest, options.match)
    random.Random(options.seed).shuffle(names)
    for name in names:
        if name in done:
            continue
        if monotonic() - began > options.seconds:
            print("time is up; run again to continue")
            break
        rows[name] = kernel_row(name)
        save(options.out, rules=rules, summary=summary(rows), kernels=dict(sorted(rows.items())))
        print(f"{name}: {rows[name]}", flush=True)
    print(summary(rows))


def kernel_row(name: str) -> dict[str, int]:
    """Stall cycles and constraints of one kernel."""
    mined = open_space(name, measured_latencies=False)
    measured = ScheduleSpace(mined.program, mined.function, measured_latencies=True)
    constraints, lowered = lowered_constraints(mined, measured)
    return {
        "instructions": len(mined.function.instructions),
        "stalls": int(mined.start().stall.sum()),
        "mined": least_stalls(mined),
        "measured": least_stalls(measured),
        "constraints": constraints,
        "lowered": lowered,
    }


def least_stalls(space: ScheduleSpace) -> int:
    """Stall cycles after each stall is lowered in turn, from the first instruction to the last."""
    start, order = space.start(), np.arange(len(space.function.instructions))
    states = [start, *(state for state, _ in lower_stalls(space, start, order))]
    return int(states[-1].stall.sum())


def lowered_constraints(mined: ScheduleSpace, measured: ScheduleSpace) -> tuple[int, int]:
    """(constraints of more than one cycle, those that are weaker with measured distances)."""
    total = lowered = 0
    for before, after in zip(mined.graph.blocks, measured.graph.blocks, strict=True):
        old, new = before.arrays.edge_cycles, after.arrays.edge_cycles
        total += int((old > 1).sum())
        lowered += int((new < old).sum())
    return total, lowered


def summary(rows: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Totals over all kernels."""
    total = {key: sum(row[key] for row in rows.values()) for key in next(iter(rows.values()))}
    freed = {part: total["stalls"] - total[part] for part in ("mined", "measured")}
    return {
        "kernels": len(rows),
        **total,
        "freed_share_mined": round(freed["mined"] / total["stalls"], 5),
        "freed_share_measured": round(freed["measured"] / total["stalls"], 5),
        "kernels_with_more": sum(row["measured"] < row["mined"] for row in rows.values()),
    }
