"""The tables of mutations: one JSON file for each package, and their summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KILLED, SURVIVED, HANGS = "killed", "survived", "timeout"
Row = dict[str, Any]
DEFAULT_COUNT = 60
"""Mutations of one package's sample."""
SAMPLED = ("core", "fusion.codegen", "parallel.simulate", "sass.safety", "store")
"""Packages whose samples together are the 300 mutations."""


class Table:
    """The results of one package, in a JSON file with one row per mutation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}
        if path.exists():
            self.head = json.loads(path.read_text())
            self.rows = {row["name"]: row for row in self.head.pop("mutants")}

    def save(self) -> None:
        """Write the file, the rows in the order of the sample."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        counts = Counter(row["outcome"] for row in self.rows.values())
        head = {**self.head, "done": len(self.rows), "outcomes": dict(sorted(counts.items()))}
        rows = ",\n  ".join(json.dumps(self.rows[name]) for name in sorted(self.rows))
        text = json.dumps(head, indent=1).removesuffix("\n}")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(f'{text},\n "mutants": [\n  {rows}\n ]\n}}\n')
        temporary.replace(self.path)


def summary(folder: Path) -> str:
    """The tables' results, as a table in Markdown.

    A mutation that survived first and was killed by a test written for it counts in the third
    column, and in the fourth one no more.
    """
    lines = [
        "| package | sample | ran | survived at first | survive | of these after some tests only |",
        "|---|---|---|---|---|---|",
    ]
    sums = Counter[str]()
    for package in sorted({*SAMPLED, *(path.stem for path in folder.glob("*.json"))}):
        table = Table(folder / f"{package}.json")
        left = [row for row in table.rows.values() if row["outcome"] == SURVIVED]
        row = {
            "sample": table.head.get("sample", DEFAULT_COUNT),
            "ran": len(table.rows),
            "first": len(left) + sum(row.get("was") == SURVIVED for row in table.rows.values()),
            "survive": len(left),
            "few": sum(row["tests"] < row["relevant"] for row in left),
        }
        sums.update(row)
        lines.append(_summary_row(f"`{package}`", row))
    return "\n".join([*lines, _summary_row("all", sums)]) + "\n"


def _summary_row(name: str, row: Mapping[str, int]) -> str:
    ran = row["ran"] or 1
    cells = [name, str(row["sample"]), str(row["ran"])]
    cells += [f"{row[key]} ({100 * row[key] / ran:.0f} %)" for key in ("first", "survive")]
    return f"| {' | '.join([*cells, str(row['few'])])} |"
