"""Write the table of measured minimum distances from a result file.

    python -m benchmarks.sass.distances.table \\
        benchmarks/sass/results/measured_distances.json.gz \\
        --out src/nostall/sass/safety/measured/sm_90.json

A row is kept only if the experiment could have refuted it: a shorter distance gave wrong results,
the row's own distance gave right ones, and the minimum is not above a distance that compilers left.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import load
from nostall.core.files import write_atomically

MARGIN = 2
"""Cycles that the table adds to a measured minimum."""


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


def table_rows(rows: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """Exact name of a pair -> [distance with the margin, measured minimum, windows].

    A name that several pairs share has the largest of their minima, and is dropped if one of them
    is no evidence.  Names whose distance would not be below the default table's are left out.
    """
    minima: dict[str, tuple[int, int, int]] = {}
    dropped: set[str] = set()
    for row in rows:
        if reason_to_drop(row):
            dropped.update(row["names"])
            continue
        minimum = max(row["minimum"], row["smallest_right"])
        for name in row["names"]:
            known, windows, safe = minima.get(name, (0, 0, row["safe"]))
            minima[name] = (max(known, minimum), windows + row["windows"], min(safe, row["safe"]))
    return {
        name: [minimum + MARGIN, minimum, windows]
        for name, (minimum, windows, safe) in sorted(minima.items())
        if name not in dropped and minimum + MARGIN < safe
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="file that sass.measured_distances wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    content = load(options.result)
    kept = table_rows(content["rows"])
    reasons: dict[str, int] = {}
    for row in content["rows"]:
        reason = reason_to_drop(row).partition(":")[0]
        reasons[reason or "kept"] = reasons.get(reason or "kept", 0) + 1
    body = {
        "gpu": content["gpu"],
        "date": content["date"],
        "margin": MARGIN,
        "pairs": reasons,
        "RAW": kept,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out, (json.dumps(body, indent=1) + "\n").encode())
    print(f"{options.out}: {len(kept)} names; pairs: {reasons}")


if __name__ == "__main__":
    main()
