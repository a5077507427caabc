"""How much of each example kernel can move, and what pins the rest.

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
            found = mobility(ScheduleSpace(program, program.kernel(source.kernel)))
            records.append(
                {
                    "kernel": name,
                    "arch": arch,
                    "instructions": found.total,
                    "movable": found.movable,
                    "share": round(found.share, 4),
                    "pins": found.pins,
                }
            )
            print(f"{arch} {name:32} {found.total:6} {found.share:7.1%}  {found.pins}")
    save(options.out, records=records)
