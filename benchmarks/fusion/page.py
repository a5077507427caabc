"""Write the tables of docs/fusion.md from the committed file.

    python -m benchmarks page fusion

A test holds the page to the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import region
from benchmarks.harness.result_file import ROOT, load, results
from nostall.core.files import write_atomically

PAGE = ROOT.parent / "docs" / "fusion.md"
_NAMES = {
    "explorer": "`explore`",
    "annealed": "`explore`, then `refined`",
    "beam": "its beam search alone",
    "greedy": "`greedy`",
    "unfused": "unfused",
}


def page(text: str) -> str:
    """docs/fusion.md with what the file says."""
    found = load(results("fusion") / "explorers.json")
    text = region(text, "gaps", gaps(found["summary"], found["columns"]))
    text = region(text, "open", unproven(found["records"]))
    return region(text, "growth", growth(found["growth"]))


def gaps(summary: Mapping[str, Any], columns: int) -> str:
    """How many regions, and each planner's distance from the optimum."""
    proven = summary["proven"]
    said = (
        f"{summary['regions']} different regions of 5 to 60 operators; of {proven} the optimum is "
        f"proven, {summary['not_proven']} have more than {columns:,} legal patterns or took the "
        f"solver too long. In {summary['several_kernels']} of the {proven} the best plan has "
        "several kernels."
    )
    rows = []
    for key, name in _NAMES.items():
        gap = summary["gaps"][key]
        shown = [f"{gap[at]:.2%}" for at in ("mean", "median", "q90", "max")]
        rows.append((name, f"{gap['within_3_percent']} of {proven}", *shown))
    head = ("plan", "within 3 %", "mean", "median", "90 % of regions", "worst")
    return f"{said}\n\n{_table(head, rows)}"


def unproven(records: Iterable[Mapping[str, Any]]) -> str:
    """Modelled microseconds where there is no optimum to compare with."""
    rows = [
        (r["name"], str(r["operators"]), *(f"{r['us'][key]:.1f}" for key in _NAMES))
        for r in records
        if not r["proven"]
    ]
    head = ("not proven, modelled us", "operators", *_NAMES.values())
    return _table(head, rows)


def growth(records: Iterable[Mapping[str, Any]]) -> str:
    """Seconds of the explorer by size."""
    rows = [
        (
            r["name"],
            f"{r['nodes']:,}",
            f"{r['operators']:,}",
            f"{r['processor_seconds']:.2f} s",
            f"{r['wall_seconds']:.2f} s",
            str(r["kernels"]),
        )
        for r in records
    ]
    return _table(("graph", "nodes", "operators", "processor", "wall", "kernels"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")


def main() -> int:
    write_atomically(PAGE, page(PAGE.read_text()).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
