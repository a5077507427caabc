"""Share of the instructions of each example kernel that can move, and what pins the others.

python -m benchmarks run sass.mobility --out benchmarks/sass/results/mobility.json

The same figures without the rule that loads of one shared location keep their order show what this
rule costs.  Moves of corpus kernels are counted twice: as offered, and as if each pair of the
in-order rules had witnesses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.corpus import catalogue

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import sources
from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.program.cover_rules import RULES, CoverTable
from nostall.sass.schedule import ScheduleSpace, dependence_scan
from nostall.sass.schedule.mobility import mobility

ALL_WITNESSED = CoverTable(RULES, frozenset(rule.pair for rule in RULES))
"""The in-order rules if each pair had witnesses."""
LARGEST = 2000
"""Instructions of the largest corpus function."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"])
    parser.add_argument(
        "--every", type=int, default=8, help="every N-th cubin of the corpus; 0: none"
    )


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
    save(
        options.out,
        cost_of_read_order=_cost(records),
        cost_of_witnesses=corpus_moves(
            catalogue.corpus()[:: options.every] if options.every else []
        ),
        records=records,
    )


def corpus_moves(paths: Sequence[Path]) -> dict[str, Any]:
    """Slides that the functions of some cubins allow, with witnesses and with whole queues."""
    total = {"cubins": 0, "functions": 0, "functions_with_fewer": 0, "slides": 0}
    whole_queues = 0
    for path in paths:
        try:
            program = Program.from_cubin(path.read_bytes())
        except BadBinary:
            continue
        total["cubins"] += 1
        for function in program.functions:
            if len(function.instructions) > LARGEST:
                continue
            offered = mobility(ScheduleSpace(program, function)).slides
            with mock.patch.object(dependence_scan, "COVER", ALL_WITNESSED):
                assumed = mobility(ScheduleSpace(program, function)).slides
            total["functions"] += 1
            total["functions_with_fewer"] += offered < assumed
            total["slides"] += offered
            whole_queues += assumed
    share = round(1 - total["slides"] / max(1, whole_queues), 6)
    return {**total, "slides_with_whole_queues": whole_queues, "cost": share}


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
