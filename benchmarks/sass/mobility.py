"""Share of the instructions of each example kernel that can move, and what pins the others.

python -m benchmarks run sass.mobility --out benchmarks/sass/results/mobility.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.mobility import mobility


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])


def main(options: argparse.Namespace) -> None:
    records = []
    for arch in options.arch:
        for name, source in sources(arch):
            program = Program.from_cubin(source.cubin)
            result = mobility(ScheduleSpace(program, program.kernel(source.kernel)))
            records.append(
                {
                    "kernel": name,
                    "arch": arch,
                    "instructions": result.total,
                    "movable": result.movable,
                    "share": round(result.share, 4),
                    "pins": result.pins,
                }
            )
            print(f"{arch} {name:32} {result.total:6} {result.share:7.1%}  {result.pins}")
    save(options.out, records=records)
