"""Speed of parsing, verifying, proposing moves and the SM model, on one CPU core.

    python -m benchmarks run sass.static_speed --out benchmarks/sass/results/static_speed.json

All times are processor time, so that other processes on the machine disturb little. Those of
nvdisasm, a separate program, are listed separately. Each figure is the median of the samples, which
the file contains. ``--profile`` prints the functions that take most of the time for the largest
kernel.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import resource
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.scaled_sizes import LAUNCHES
from nostall.core.launch import LaunchSpec
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.safety.verify import verify_program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.tuning.sources.triton_source import compile_triton

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / ".cache" / "corpus" / "triton-3.9.0"
KERNELS = (
    "softmax.sm_90",
    "fused_feedforward.sm_100",
    "matmul-bigtile.sm_80",
    "many_registers-spill.sm_90",
)
"""About 500, 1,000, 2,500 and 7,000 instructions."""
SCALED_SIZES = ROOT / "benchmarks" / "kernels" / "scaled_sizes.py"
"""One kernel of about 500, 2,500 and 10,000 instructions, to measure how times grow with size."""
TARGETS = {
    "parse_and_analyse_s": ("at 2,500 instructions", "<=", 0.4),
    "verify_s": ("at 2,500 instructions", "<=", 2.0),
    "proposals_per_s": ("at 2,500 instructions", ">=", 10_000.0),
    "model_per_s": ("at 1,000 instructions", ">=", 1_250.0),
}

Row = dict[str, Any]


def processor_seconds(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds of this process, seconds of its child processes) of one call, processor time."""
    before, began = _children(), time.process_time()
    work()
    return time.process_time() - began, _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def random_schedule(space: ScheduleSpace, moves: int) -> Schedule:
    """The schedule after ``moves`` random legal moves from the original."""
    rng = np.random.default_rng(1)
    state = space.start()
    for _ in range(moves):
        move = space.propose(state, rng)
        state = state if move is None else space.apply(state, move)
    return state


def proposal_rates(space: ScheduleSpace, draws: int) -> tuple[float, float]:
    """(draws per second, legal moves per second); each draw includes the check for legality."""
    rng = np.random.default_rng(2)
    state = space.start()
    began = time.process_time()
    legal = sum(space.draw(state, rng) is not None for _ in range(draws))
    spent = time.process_time() - began
    return draws / spent, legal / spent


def model_rate(program: Program, space: ScheduleSpace, launch: LaunchSpec, seconds: float) -> float:
    """Evaluations per second of the SM model; consecutive ones evaluate different states."""
    model = SmModel(program, space.function, launch)
    rng = np.random.default_rng(3)
    states = [space.start()]
    while len(states) < 64:
        move = space.propose(states[-1], rng)
        if move is None:
            break
        states.append(space.apply(states[-1], move))
    model.evaluate(states[:2])
    count, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        model.evaluate([states[count % len(states)]])
        count += 1
    return count / (time.process_time() - began)


def measure(name: str, data: bytes, launch: LaunchSpec, samples: int) -> Row:
    """Medians and samples of all figures of one kernel."""
    program = Program.from_cubin(data)
    space = ScheduleSpace(program, program.kernels[0])
    candidate = space.impose(random_schedule(space, 20)).to_cubin()
    values_by_figure: dict[str, list[float]] = {}
    for _ in range(samples):
        parse, nvdisasm = processor_seconds(lambda: Program.from_cubin(data))
        space_seconds, _ = processor_seconds(lambda: ScheduleSpace(program, program.kernels[0]))
        verify, verify_nvdisasm = processor_seconds(
            lambda: verify_program(Program.from_cubin(data), Program.from_cubin(candidate))
        )
        draw_rate, legal_rate = proposal_rates(space, 2000)
        figures = {
            "parse_s": parse,
            "space_s": space_seconds,
            "parse_and_analyse_s": parse + space_seconds,
            "nvdisasm_s": nvdisasm,
            "verify_s": verify,
            "verify_nvdisasm_s": verify_nvdisasm,
            "proposals_per_s": draw_rate,
            "legal_per_s": legal_rate,
            "model_per_s": model_rate(program, space, launch, 0.4),
        }
        for key, value in figures.items():
            values_by_figure.setdefault(key, []).append(value)
    return {
        "kernel": name,
        "instructions": len(space.function.instructions),
        "edges": space.graph.edge_count,
        "median": {key: statistics.median(values) for key, values in values_by_figure.items()},
        "samples": values_by_figure,
    }


def growth(rows: list[Row], key: str) -> list[Row]:
    """Growth of a figure from each size to the next, divided by that of n log n (1: the same)."""
    steps: list[Row] = []
    for small, large in pairwise(rows):
        n, m = small["instructions"], large["instructions"]
        expected = m * math.log(m) / (n * math.log(n))
        ratio = large["median"][key] / small["median"][key]
        steps.append({"from": n, "to": m, "against_n_log_n": round(ratio / expected, 3)})
    return steps


def _corpus() -> list[tuple[str, LaunchSpec]]:
    index = json.loads((CORPUS / "index.json").read_text())
    return [(name, LaunchSpec(**index[name]["launch"])) for name in KERNELS]


def _print_row(row: Row) -> Row:
    figures = " ".join(f"{key}={value:.4g}" for key, value in row["median"].items())
    print(f"{row['kernel']} ({row['instructions']} instructions): {figures}", flush=True)
    return row


def check_targets(rows: list[Row]) -> list[Row]:
    """Each target with the value that was measured at its size."""
    by_size = {"at 1,000 instructions": rows[1], "at 2,500 instructions": rows[2]}
    targets: list[Row] = []
    for key, (where, sign, bound) in TARGETS.items():
        value = by_size[where]["median"][key]
        met = value <= bound if sign == "<=" else value >= bound
        targets.append({"figure": key, "where": where, "target": f"{sign} {bound:g}", "met": met})
        targets[-1]["value"] = round(value, 4)
    return targets


def profile(name: str) -> None:
    """Print the functions that take most time when nostall parses, verifies and proposes."""
    data = (CORPUS / f"{name}.cubin").read_bytes()
    program = Program.from_cubin(data)
    space = ScheduleSpace(program, program.kernels[0])
    candidate = Program.from_cubin(space.impose(random_schedule(space, 5)).to_cubin())
    parts: dict[str, Callable[[], object]] = {
        "parse": lambda: Program.from_cubin(data),
        "space": lambda: ScheduleSpace(program, program.kernels[0]),
        "verify": lambda: verify_program(program, candidate),
        "propose": lambda: proposal_rates(space, 1000),
    }
    for part, work in parts.items():
        profiler = cProfile.Profile()
        profiler.runcall(work)
        print(f"== {part}, {name}")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(12)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", type=int, default=5, help="samples of each figure")
    parser.add_argument("--profile", action="store_true", help="print a profile, measure nothing")


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.profile:
        profile(KERNELS[-1])
        return 0
    rows = [
        _print_row(measure(name, (CORPUS / f"{name}.cubin").read_bytes(), launch, options.samples))
        for name, launch in _corpus()
    ]
    scaled = [
        _print_row(measure(name, compile_triton(SCALED_SIZES, name).cubin, launch, options.samples))
        for name, launch in LAUNCHES.items()
    ]
    targets = check_targets(rows)
    for row in targets:
        met = "met" if row["met"] else "NOT met"
        print(
            f"{row['figure']:22} {row['where']}: {row['value']:g} (target {row['target']}): {met}"
        )
    growth_by_figure = {key: growth(scaled, key) for key in ("parse_and_analyse_s", "verify_s")}
    for key, steps in growth_by_figure.items():
        print(f"growth of {key} against n log n: {[s['against_n_log_n'] for s in steps]}")
    if options.out:
        save(
            options.out,
            load_average=os.getloadavg(),
            targets=targets,
            growth=growth_by_figure,
            kernels=rows,
            grown=scaled,
        )
    return 0
