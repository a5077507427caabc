"""Measure how many seeded violations each part of the verifier rejects, by kind.

python -m tests.mutations.report --out benchmarks/sass/results/seeded_hazards.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save

from tests.mutations.mutants import MUTATIONS, check_by_part, mutants

Row = dict[str, Any]
_COUNTS = ("mutants", "refused", "unreadable", "structure", "hazards", "symbolic")
DISASSEMBLED = 3
"""Mutants of each kind that nvdisasm parses; the others are parsed without it."""


def measure(kind: str, count: int, per_function: int) -> Row:
    """How many mutants of one kind each part of the verifier rejects.

    ``hazards`` and ``symbolic`` check only the mutants that the parser and the structure check
    accept.
    """
    row: Row = {"kind": kind, **dict.fromkeys(_COUNTS, 0), "accepted": []}
    for number, mutant in enumerate(mutants(kind, count, per_function)):
        result = check_by_part(mutant, disassemble=number < DISASSEMBLED)
        row["mutants"] += 1
        row["refused"] += result.rejected
        row["unreadable"] += result.unreadable
        row["structure"] += result.structure
        row["hazards"] += bool(result.hazards or result.order)
        row["symbolic"] += bool(result.symbolic)
        if not result.rejected:
            row["accepted"].append(str(mutant))
    return row


def main() -> int:
    """Print the table and write the file; returns 1 if the verifier accepted a mutant."""
    parser = argparse.ArgumentParser(
        description="Share of seeded violations that each part of the verifier rejects."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60, help="most mutants per kind")
    parser.add_argument("--each", type=int, default=4, help="most mutants per kind and function")
    parser.add_argument("--kind", help="measure only this kind of violation")
    options = parser.parse_args()
    rows: list[Row] = []
    print(f"{'kind':38} {' '.join(f'{name:>10}' for name in _COUNTS)}")
    for kind in [options.kind] if options.kind else list(MUTATIONS):
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
        reread_by_nvdisasm=sum(min(DISASSEMBLED, row["mutants"]) for row in rows),
        judged_by_both_halves=judged,
        hazards_rate=round(total["hazards"] / max(judged, 1), 4),
        symbolic_rate=round(total["symbolic"] / max(judged, 1), 4),
        kinds=rows,
    )
    return 0 if total["refused"] == total["mutants"] else 1


if __name__ == "__main__":
    sys.exit(main())
