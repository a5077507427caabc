"""Catch rates by kind and by half of the verifier.

python -m tests.mutations.report --out benchmarks/sass/results/seeded_hazards.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save

from tests.mutations.judging import KINDS, mutants, opinions

Row = dict[str, Any]
_COUNTS = ("mutants", "refused", "unreadable", "structure", "hazards", "symbolic")
FULL = 3
"""Mutants of each kind that are disassembled again; the others reuse what is known."""


def measure(kind: str, count: int, each: int) -> Row:
    """How many mutants of one kind each part of the verifier refuses.

    ``hazards`` and ``symbolic`` judge only what the reader and the structure check let pass."""
    row: Row = {"kind": kind, **dict.fromkeys(_COUNTS, 0), "accepted": []}
    for number, mutant in enumerate(mutants(kind, count, each)):
        found = opinions(mutant, full=number < FULL)
        row["mutants"] += 1
        row["refused"] += found.refused
        row["unreadable"] += found.unreadable
        row["structure"] += found.structure
        row["hazards"] += bool(found.hazards)
        row["symbolic"] += bool(found.symbolic)
        if not found.refused:
            row["accepted"].append(str(mutant))
    return row


def main() -> int:
    """Print the table, write the file, return 1 when a mutant was accepted."""
    parser = argparse.ArgumentParser(description="Catch rates of the verifier by kind and half.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60, help="mutants per kind, at most")
    parser.add_argument("--each", type=int, default=4, help="mutants per kind and function")
    parser.add_argument("--kind", help="this kind only")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'kind':38} {' '.join(f'{name:>10}' for name in _COUNTS)}")
    for kind in [options.kind] if options.kind else list(KINDS):
        row = measure(kind, options.count, options.each)
        rows.append(row)
        print(f"{kind:38} {' '.join(f'{row[name]:10}' for name in _COUNTS)}", flush=True)
        for text in row["accepted"]:
            print(f"    ACCEPTED: {text}")
    total = {name: sum(row[name] for row in rows) for name in _COUNTS}
    judged = total["mutants"] - total["unreadable"] - total["structure"]
    print(f"{'all':38} {' '.join(f'{total[name]:10}' for name in _COUNTS)}")
    save(
        options.out,
        total=total,
        reread_by_nvdisasm=sum(min(FULL, row["mutants"]) for row in rows),
        judged_by_both_halves=judged,
        hazards_rate=round(total["hazards"] / max(judged, 1), 4),
        symbolic_rate=round(total["symbolic"] / max(judged, 1), 4),
        kinds=rows,
    )
    return 0 if total["refused"] == total["mutants"] else 1


if __name__ == "__main__":
    sys.exit(main())
