"""Lowered stalls between dependent neighbours: does the verifier refuse each of them?

    python -m benchmarks run sass.lowered_stalls --out benchmarks/sass/results/lowered_stalls.json

In compiler output the stall of a fixed-latency instruction whose result the next instruction reads
is lowered to one less, to half, and to 1. The result must be refused, unless compilers left the
lower distance between the same two opcodes, operand by operand, in other code: such a distance is
listed with its occurrences.
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from nostall.core.errors import UnsupportedArchitecture
from nostall.sass import Program
from nostall.sass.program import Function, Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.latency import LatencyTable

ROOT = Path(__file__).resolve().parents[3]
PRODUCERS = (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.UNIFORM)

Row = dict[str, Any]


def lowered(function: Function, sm: int) -> Iterator[tuple[int, int]]:
    """(position, lower stall) of each mutant of a function."""
    order = function.instructions
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        is_same_block = function.block_numbers[at] == function.block_numbers[at + 1]
        if first.pipe not in PRODUCERS or not first.has_fixed_latency(sm) or not is_same_block:
            continue
        stall = first.control.stall
        is_read = set(first.defs) & set(second.uses) and not first.never_executes
        if is_read and stall >= 2 and not second.never_executes:
            for lower in sorted({stall - 1, max(1, stall // 2), 1}):
                yield at, lower


def mutate(function: Function, at: int, stall: int) -> Function:
    """The function with another stall at one position."""
    order = list(function.instructions)
    order[at] = order[at].with_control(order[at].control.with_(stall=stall))
    return function.reordered(order)


def attested_distance(table: LatencyTable, first: Instruction, second: Instruction) -> int:
    """The distance that suffices for all registers that the second instruction reads."""
    registers = set(first.defs) & set(second.uses)
    return max(table.safe_distance(first, second, r, "RAW") for r in registers)


def judge(program: Program, function: Function, rng: random.Random, limit: int) -> Iterator[Row]:
    """One row for each mutant of a function, at most ``limit``."""
    validator = HazardValidator(program.sm)
    mutants = list(lowered(function, program.sm))
    for at, stall in sorted(rng.sample(mutants, min(limit, len(mutants)))):
        first, second = function.instructions[at], function.instructions[at + 1]
        refused = bool(validator.compare(function, mutate(function, at, stall)))
        yield {
            "refused": refused,
            "pair": f"{first.text} -> {second.text}",
            "stall": [first.control.stall, stall],
            "attested": attested_distance(validator.table, first, second),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=int, default=12, help="mutants of each function")
    parser.add_argument("--every", type=int, default=1, help="take every N-th cubin")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Verify the mutants; returns 1 if one is accepted below what compilers left elsewhere."""
    counts: Counter[str] = Counter()
    accepted: list[Row] = []
    for path in sorted((ROOT / "tests" / "corpus" / "nvcc").glob("*.cubin"))[:: options.every]:
        try:
            program = Program.from_cubin(path.read_bytes())
        except UnsupportedArchitecture:
            continue
        rng = random.Random(zlib.crc32(path.name.encode()))
        for function in program.functions:
            for row in judge(program, function, rng, options.limit):
                is_attested = row["stall"][1] >= row["attested"]
                kind = "refused" if row["refused"] else "attested" if is_attested else "accepted"
                counts[kind] += 1
                if not row["refused"]:
                    accepted.append({"cubin": path.name, "function": function.name, **row})
        print(path.name, dict(counts), flush=True)
    save(options.out, counts=dict(counts), not_refused=accepted)
    return 1 if counts["accepted"] else 0
