"""Share of the instructions of each example kernel that can move, and what pins the others.

python -m benchmarks run sass.mobility --out benchmarks/sass/results/mobility.json

The same figures without the rule that loads of one shared location keep their order show what this
rule costs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace, dependence_scan
from nostall.sass.schedule.mobility import mobility


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])


def main(options: argparse.Namespace) -> None:
    records = []
    for arch in options.arch:
        for name, source in sources(arch):
            program = Program.from_cubin(source.cubin)
            kernel = program.kernel(source.kernel)
            result = mobility(ScheduleSpace(program, kernel))
            with mock.patch.object(dependence_scan, "order_shared_reads"):
                unordered = mobility(ScheduleSpace(program, kernel))
            records.append(
                {
                    "kernel": name,
                    "arch": arch,
                    "instructions": result.total,
                    "movable": result.movable,
                    "share": round(result.share, 4),
                    "slides": result.slides,
                    "movable_if_shared_reads_swap": unordered.movable,
                    "slides_if_shared_reads_swap": unordered.slides,
                    "pins": result.pins,
                }
            )
            print(f"{arch} {name:32} {result.total:6} {result.share:7.1%}  {result.pins}")
    save(options.out, cost_of_read_order=_cost(records), records=records)


def _cost(records: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the movable instructions, and of the slides, that the order of reads forbids."""
    totals = {
        key: sum(record[key] for record in records)
        for key in (
            "movable",
            "slides",
            "movable_if_shared_reads_swap",
            "slides_if_shared_reads_swap",
        )
    }
    return {
        key: round(1 - totals[key] / totals[f"{key}_if_shared_reads_swap"], 5)
        for key in ("movable", "slides")
    }
