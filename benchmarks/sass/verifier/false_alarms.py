"""Functions of libraries that were not mined: how many does the verifier refuse?

    python -m benchmarks run sass.false_alarms --wheels FOLDER --state FOLDER \\
        --out benchmarks/sass/results/false_alarms.json

The wheels are those that ``libraries.toml`` holds out; ``pip download --no-deps`` brings them. Each
function is validated, by all absolute rules, and must be written back byte by byte. A second run
continues: the state folder keeps the drawn functions and the answers.

``--libraries blind`` and ``blind_2`` to ``blind_5`` judge libraries of which no refusal had been
read when the rules of their time were made.

The functions are in two halves, by a hash of their code. Rules may be written from refused
functions of the *examined* half only; the rate of the *unseen* half is the result.  ``--half``
judges one half.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tools.mining.functions import CodeFunction
from tools.typed_file import read_typed, write_typed

from benchmarks.harness.result_file import save
from benchmarks.sass.verifier.library_functions import Row, batches, draw, libraries, programs
from nostall.core.errors import NostallError
from nostall.sass import Program
from nostall.sass.safety.verify import validate_program

SAVE_SECONDS = 60
SHOWN_FINDINGS = 3

EXPLANATIONS: tuple[tuple[str, str], ...] = (
    (
        "after HMMA",
        "ptxas protects a matrix product by a scoreboard or, where 19 to 32 cycles lie between, by "
        "the distance; the mined code has too few such distances, so the class's holds",
    ),
    (
        "before VOTEU",
        "a predicate is overwritten after VOTEU reads it; no sighting of the pair, so a larger "
        "distance is assumed",
    ),
    (
        "nvdisasm do",
        "nvdisasm does not list all instructions of the function, so the verifier cannot read it",
    ),
)
"""(text in a finding, why the verifier refuses this code), the first match counts.

A refusal without a match is unexplained: nobody examined the function.
"""


Batch = tuple[str, Sequence[CodeFunction]]
"""(library, functions of one architecture)."""

HALVES = ("examined", "unseen")


def half(function: CodeFunction) -> str:
    """The half of a function; it depends on its code only."""
    return HALVES[function.key[-1] % 2]


def judge(function: CodeFunction, program: Program | NostallError) -> Row:
    """What the verifier says of one function."""
    row: Row = {
        "sm": function.sm,
        "cuda": function.cuda,
        "half": half(function),
        "instructions": function.size,
        "round_trip": True,
    }
    if isinstance(program, NostallError):
        text = str(program)[:300]
        return {**row, "kinds": ["unreadable"], "findings": [text], "why": explanation(text)}
    row["name"] = program.functions[0].name
    row["round_trip"] = program.to_cubin() == function.cubin
    findings = validate_program(program).findings
    if findings:
        row["kinds"] = sorted({f.kind for f in findings})
        texts = [f"{f.part} {f.kind} {f.offset:#x}: {f.instruction}: {f.reason}" for f in findings]
        row["findings"] = texts[:SHOWN_FINDINGS]
        row["why"] = explanation(" ".join(texts))
    return row


def judge_batch(batch: Batch) -> dict[bytes, Row]:
    """Key -> answer, of (library, functions)."""
    library, functions = batch
    pairs = zip(functions, programs(functions), strict=True)
    return {f.key: {"library": library, **judge(f, program)} for f, program in pairs}


def in_processes(
    work: Callable[[Batch], dict[bytes, Row]], items: Iterable[Batch], jobs: int
) -> Iterator[dict[bytes, Row]]:
    """``work`` of each item, in order; with ``jobs`` above 1 in as many processes."""
    if jobs == 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(jobs) as pool:
        running: deque[Future[dict[bytes, Row]]] = deque()
        for item in items:
            running.append(pool.submit(work, item))
            if len(running) >= 2 * jobs:
                yield running.popleft().result()
        for future in running:
            yield future.result()


def explanation(text: str) -> str:
    """Why the verifier refuses code with these findings; empty if nobody looked yet."""
    return next((why for part, why in EXPLANATIONS if part in text), "")


def _explained(row: Row) -> Row:
    """An answer with its explanation of today."""
    if "kinds" not in row:
        return row
    return {**row, "why": explanation(" ".join(row["findings"]))}


def summary(rows: dict[bytes, Row]) -> Row:
    """Totals, and the functions and refusals by architecture, CUDA version and library."""
    alarms = [row for row in rows.values() if "kinds" in row]
    unseen = [row for row in rows.values() if row["half"] == "unseen"]
    return {
        "unseen": {
            **_rate(unseen),
            "by_architecture": _groups(unseen, lambda row: f"sm_{row['sm']}"),
            "by_cuda": _groups(unseen, lambda row: row["cuda"]),
            "by_library": _groups(unseen, lambda row: row["library"]),
        },
        "examined": _rate([row for row in rows.values() if row["half"] == "examined"]),
        "functions": len(rows),
        "instructions": sum(row["instructions"] for row in rows.values()),
        "refused": len(alarms),
        "unexplained": sum(not row.get("why") for row in alarms),
        "round_trip_failures": sum(not row["round_trip"] for row in rows.values()),
        "by_architecture": _groups(rows.values(), lambda row: f"sm_{row['sm']}"),
        "by_cuda": _groups(rows.values(), lambda row: row["cuda"]),
        "by_library": _groups(rows.values(), lambda row: row["library"]),
        "kinds": dict(Counter(kind for row in alarms for kind in row["kinds"])),
        "reasons": dict(Counter(f"sm_{row['sm']}: {row['why']}" for row in alarms)),
    }


def _rate(rows: list[Row]) -> Row:
    """The number of functions, and how many are refused."""
    refused = sum("kinds" in row for row in rows)
    percent = round(100 * refused / max(1, len(rows)), 3)
    return {"functions": len(rows), "refused": refused, "refused_percent": percent}


def _groups(rows: Any, key: Any) -> dict[str, list[int]]:
    """Name of a group -> [functions, refused]."""
    groups: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        groups[key(row)][0] += 1
        groups[key(row)][1] += "kinds" in row
    return dict(sorted(groups.items()))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheels", type=Path, required=True, help="the folder of the wheels")
    parser.add_argument("--state", type=Path, required=True, help="a folder for the run's state")
    parser.add_argument("--limit", type=int, default=600, help="functions by library and sm")
    parser.add_argument("--max-size", type=int, default=2000, help="instructions of a function")
    parser.add_argument(
        "--libraries",
        choices=("held_out", "blind", "blind_2", "blind_3", "blind_4", "blind_5"),
        default="held_out",
        help="part to judge",
    )
    parser.add_argument("--half", choices=HALVES, help="judge this half only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes that judge")
    parser.add_argument("--restart", action="store_true", help="forget the answers of earlier runs")
    parser.add_argument("--again", action="store_true", help="judge the refused functions again")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Verify the functions; returns 1 if one is refused without an explanation."""
    options.state.mkdir(parents=True, exist_ok=True)
    began = saved = time.monotonic()
    names = libraries(options.libraries)
    contents = draw(options.wheels, names, options.state, options.limit, options.max_size)
    kept = options.state / "answers"
    rows: dict[bytes, Row] = {}
    if kept.exists() and not options.restart:
        rows = {key: _explained(row) for key, row in read_typed(kept, dict[bytes, Row]).items()}
    done = {key for key, row in rows.items() if not options.again or "kinds" not in row}

    def wanted(function: CodeFunction) -> bool:
        return function.size <= options.max_size and options.half in (None, half(function))

    work = batches(list(contents), options.state, done, wanted)
    for judged in in_processes(judge_batch, work, options.jobs):
        rows.update(judged)
        if time.monotonic() - saved > SAVE_SECONDS:
            _write(options.out, kept, contents, rows)
            saved = time.monotonic()
        if time.monotonic() - began > options.seconds:
            print("time is up; run again to continue", file=sys.stderr)
            break
    _write(options.out, kept, contents, rows)
    return 1 if summary(rows)["unexplained"] else 0


def _write(out: Path, kept: Path, contents: dict[str, Row], rows: dict[bytes, Row]) -> None:
    write_typed(kept, rows)
    total = summary(rows)
    print(f"{total['functions']} functions, {total['refused']} refused", flush=True)
    refused = [row for row in rows.values() if "kinds" in row]
    save(out, summary=total, libraries=contents, refused=refused)
