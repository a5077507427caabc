"""Write the table of measured distances from result files.

    python -m benchmarks.sass.distances.table \\
        benchmarks/sass/results/measured_distances.json.gz \\
        --out src/nostall/sass/safety/measured/sm_90.json

A pair has a minimum only if the experiment could have refuted it: a shorter distance gave wrong
results, the minimum gave right ones, and it is not above a distance that compilers left.  Other
pairs with wrong results are refuted at those distances.  If an operand reads several words of a
result, a wrong result does not say which word was late, so such a minimum refutes nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load
from nostall.core.files.atomic import write_atomically

MARGIN = 2
"""Cycles that the verifier adds to a minimum."""

Rows = dict[str, dict[str, dict[str, int]]]
"""Kind of pair -> producer -> consumer -> cycles."""


@dataclass(frozen=True)
class Table:
    """The rows of the table; see :mod:`nostall.sass.safety.measured_distances`."""

    minima: Rows
    joint: Rows
    refuted: Rows
    reasons: dict[str, int]
    """Why pairs have no minimum -> number of pairs; ``kept`` counts the others."""


def reason_to_drop(row: dict[str, Any]) -> str:
    """Why a row of the results is no evidence, or "" if it is."""
    if "problem" in row:
        return row["problem"]  # type: ignore[no-any-return]
    if row["above_sighting"]:
        return "the minimum is above a distance that compilers left"
    if not row["largest_wrong"]:
        return "no distance gave a wrong result"
    if row["wrong_but_not_stale"]:
        return "some wrong results are not the stale value"
    if row["smallest_right"] is None:
        return "every right result was delayed"
    return ""


def make_table(results: Iterable[Iterable[dict[str, Any]]]) -> Table:
    """The table from the rows of result files, later files last.

    A pair is no evidence if its last row is none.  Wrong results of each file count.  A name that
    several pairs share has the largest of their minima, and none if one of them is no evidence.
    """
    last: dict[str, dict[str, Any]] = {}
    wrong_below: dict[str, int] = {}
    for rows in results:
        for row in rows:
            pair = row["pair"]
            last[pair] = row
            if "problem" not in row and row["largest_wrong"] and not row["above_sighting"]:
                wrong_below[pair] = max(wrong_below.get(pair, 0), row["largest_wrong"] + 1)
    pairs_of: dict[tuple[str, str], list[str]] = {}
    for pair, row in last.items():
        for name in row["names"]:
            pairs_of.setdefault((row["kind"], name), []).append(pair)
    reasons = Counter(reason_to_drop(row).partition(":")[0] or "kept" for row in last.values())
    table = Table({}, {}, {}, dict(reasons))
    for (kind, name), pairs in sorted(pairs_of.items()):
        single = max((wrong_below.get(p, 0) for p in pairs if not last[p]["joint"]), default=0)
        joint = max((wrong_below.get(p, 0) for p in pairs if last[p]["joint"]), default=0)
        is_proven = not any(reason_to_drop(last[pair]) for pair in pairs)
        if is_proven:
            cycles = max(single, joint, *(last[pair]["smallest_right"] for pair in pairs))
            _add(table.joint if joint else table.minima, kind, name, cycles)
        if single and (joint or not is_proven):
            _add(table.refuted, kind, name, single)
    return table


def _add(rows: Rows, kind: str, name: str, cycles: int) -> None:
    producer, _, consumer = name.partition("|")
    rows.setdefault(kind, {}).setdefault(producer, {})[consumer] = cycles


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", help="files that sass.measured_distances wrote"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    contents = [load(path) for path in options.results]
    gpus = {content["gpu"]["gpu"] for content in contents}
    table = make_table(content["rows"] for content in contents)
    body = {
        "gpu": ", ".join(sorted(gpus)),
        "date": max(content["date"] for content in contents),
        "margin": MARGIN,
        "pairs": table.reasons,
        "minima": table.minima,
        "joint": table.joint,
        "refuted": table.refuted,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, text(body).encode())
    counts = {
        part: sum(len(row) for rows in getattr(table, part).values() for row in rows.values())
        for part in ("minima", "joint", "refuted")
    }
    print(f"{options.out}: {counts} names; pairs: {table.reasons}")


def text(body: dict[str, Any]) -> str:
    """JSON with one line for each producer."""
    lines = json.dumps(body, indent=1).splitlines()
    rows: list[str] = []
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if depth > 3:
            rows[-1] += line.strip() + ("" if line.endswith("{") else " ")
        elif depth == 3 and line.strip().startswith("}"):
            rows[-1] = rows[-1].rstrip() + line.strip()
        else:
            rows.append(line)
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
