"""Random walks of legal moves over all corpus kernels: does the verifier accept the results?

    python -m benchmarks run sass.random_walks --moves 1000 \\
        --out benchmarks/sass/results/random_walks.json

The result file is written after each cubin. A second run computes only cubins that are missing or
whose file or code under test has changed. ``--every N`` takes every N-th cubin. The seed is derived
from the cubin's name, so failures are reproducible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.safety.verdict import Verdict
from nostall.sass.safety.verify import verify_program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

ROOT = Path(__file__).resolve().parents[3]
CUBIN_PATTERNS = (".cache/corpus/*/*.cubin", "tests/corpus/nvcc/*.cubin", "examples/nvcc/*.cubin")
VERIFIED_FRACTIONS = (0.1, 0.4, 1.0)
"""Fractions of the walk after which the state is verified."""

Row = dict[str, Any]


def cubins(every: int) -> list[Path]:
    """Every N-th cubin of the corpus, in a fixed order."""
    paths = sorted(path for pattern in CUBIN_PATTERNS for path in ROOT.glob(pattern))
    return [path for path in paths if not path.name.startswith("refused")][::every]


def code_digest() -> str:
    """Digest of the code and the tables under test."""
    folder = ROOT / "src" / "nostall" / "sass"
    digest = hashlib.sha256()
    for part in ("binary", "program", "safety", "schedule"):
        for path in sorted((folder / part).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def verify_state(program: Program, space: ScheduleSpace, state: Schedule) -> Verdict:
    """Verdict on a state, from the patched bytes and their disassembly."""
    return verify_program(program, Program.from_cubin(space.impose(state).to_cubin()))


def random_walk(
    space: ScheduleSpace, seed: int, moves: int
) -> Iterator[tuple[ScheduleMove | None, Schedule]]:
    """States of one walk with the move that led to each; ends early if no move is proposed."""
    rng = np.random.default_rng(seed)
    state = space.start()
    yield None, state
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is None:
            return
        state = space.apply(state, move)
        yield move, state


def find_refused_move(
    program: Program, space: ScheduleSpace, walk: list[tuple[ScheduleMove | None, Schedule]]
) -> Row:
    """Find by bisection a move from an accepted state to a refused one."""
    original = verify_state(program, space, walk[0][1])
    if not original.safe:
        findings = [f"{finding.part}: {finding}" for finding in original.findings[:4]]
        return {"step": 0, "move": "the original itself", "findings": findings}
    low, high = 0, len(walk) - 1
    verdict = verify_state(program, space, walk[high][1])
    while high - low > 1:
        middle = (low + high) // 2
        middle_verdict = verify_state(program, space, walk[middle][1])
        if middle_verdict.safe:
            low = middle
        else:
            high, verdict = middle, middle_verdict
    move = walk[high][0]
    text = "" if move is None else space.function.instructions[move.index].text
    findings = [f"{finding.part}: {finding}" for finding in verdict.findings[:4]]
    return {"step": high, "move": str(move), "instruction": text, "findings": findings}


def walk_function(program: Program, function: Function, seed: int, moves: int) -> Row:
    """Do a random walk over the schedules of one function and verify three of its states."""
    space = ScheduleSpace(program, function)
    began = time.perf_counter()
    walk = list(random_walk(space, seed, moves))
    row: Row = {
        "function": function.name,
        "instructions": len(function.instructions),
        "moves": len(walk) - 1,
        "seed": seed,
        "walk_s": round(time.perf_counter() - began, 3),
    }
    began = time.perf_counter()
    for stop in sorted({round(part * (len(walk) - 1)) for part in VERIFIED_FRACTIONS}):
        if not verify_state(program, space, walk[stop][1]).safe:
            row["failure"] = find_refused_move(program, space, walk[: stop + 1])
            break
    row["verify_s"] = round(time.perf_counter() - began, 3)
    row["passed"] = "failure" not in row
    return row


def walk_cubin(path: Path, moves: int) -> list[Row]:
    """One row per function of a cubin."""
    program = Program.from_cubin(path.read_bytes())
    seed = zlib.crc32(path.name.encode())
    return [walk_function(program, function, seed, moves) for function in program.functions]


def summary(rows: dict[str, Row]) -> Row:
    """Totals over all cubins."""
    functions = [f for row in rows.values() for f in row["functions"]]
    return {
        "cubins": len(rows),
        "functions": len(functions),
        "moves": sum(f.get("moves", 0) for f in functions),
        "passed": sum(f["passed"] for f in functions),
        "failed": sum(not f["passed"] for f in functions),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--moves", type=int, default=1000, help="moves of each walk")
    parser.add_argument("--every", type=int, default=1, help="take every N-th cubin")
    parser.add_argument("--match", default="", help="only cubins with this in their path")
    parser.add_argument("--part", default="0/1", help="K/N: cubins K, K+N, K+2N, ... only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Run the walks; returns 1 if a walk failed."""
    part, parts = (int(text) for text in options.part.split("/"))
    code, began = code_digest(), time.monotonic()
    done: Row = json.loads(options.out.read_text()) if options.out.is_file() else {}
    rows: dict[str, Row] = done.get("cubins", {})
    for path in cubins(options.every)[part::parts]:
        name = str(path.relative_to(ROOT)).removeprefix(".cache/corpus/")
        if options.match not in name:
            continue
        key = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "code": code,
            "asked": options.moves,
        }
        if {k: rows.get(name, {}).get(k) for k in key} == key:
            continue
        if time.monotonic() - began > options.seconds:
            print("time is up; run again to continue", file=sys.stderr)
            break
        try:
            functions = walk_cubin(path, options.moves)
        except Exception:  # recorded as a failure of this cubin
            functions = [{"function": "", "passed": False, "error": traceback.format_exc()}]
        rows[name] = {**key, "functions": functions}
        for row in functions:
            state = "ok" if row["passed"] else f"FAILED {row.get('failure', row.get('error'))}"
            size = f"{row.get('moves', 0)} moves, {row.get('instructions', 0)} instructions"
            print(f"{name} {row['function'][:30]}: {size}: {state}", flush=True)
        save(options.out, summary=summary(rows), cubins=dict(sorted(rows.items())))
    total = summary(rows)
    print(f"{total['passed']} of {total['functions']} walks accepted, {total['moves']} moves")
    return 1 if total["failed"] else 0
