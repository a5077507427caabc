"""``docs/results/issue-distances.md``: issue distances and orders measured on a GPU.

python -m benchmarks page issue-distances
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render_page, source
from benchmarks.sass.distances.table import reason_to_drop

PAGE = PAGES / "issue-distances.md"
FOLDER = results("sass")
DISTANCES = FOLDER / "measured_distances.json.gz"
WITNESSES = FOLDER / "witnesses.json.gz"
SLACK = FOLDER / "freed_slack.json"
_COLUMNS = ("int:data", "fma:data", "half:data", "double:data", "mma:data", "HMMA:accumulator",
            "lsu:data", "lsu:address", "const:address", "xu:data", "uniform:data",
            "guard")  # fmt: skip
_TITLES = {"HMMA:accumulator": "HMMA c"}
_FIRST = {"alignment": "0", "warps": "1", "spacing": "stall"}
"""The condition that runs first: alignment 0, one warp, the plain stall."""

Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    content = source(DISTANCES)
    rows = content["rows"]
    measured = [row for row in rows if "problem" not in row and row["kind"] == "RAW"]
    reasons = Counter(reason_to_drop(row).partition(":")[0] for row in rows)
    values = {
        **content,
        "kept": reasons.pop("", 0),
        "reasons": dict(reasons.most_common()),
        **_beside_compilers(measured),
        **{name: _larger(measured, name) for name in _FIRST},
        "consumers": [_TITLES.get(role, role.replace(":", " ")) for role in _COLUMNS],
        "minima": _minima(measured),
        **_orders(row for row in load(WITNESSES)["rows"] if "problem" not in row),
        "witnesses_file": WITNESSES,
        "slack": source(SLACK),
    }
    return render_page(__file__, PAGE, values)


def _beside_compilers(measured: Sequence[Row]) -> Row:
    """Minima beside the distances that compilers leave, and beside floors and limits."""
    seen = [row for row in measured if row["sighting"] is not None]
    wrong = [row for row in measured if row["largest_wrong"] and not row["joint"]]
    limits = [row for row in wrong if row["minimum"] > row["safe"]]
    groups = Counter(row["coarse"].replace("|", " → ") for row in limits)
    return {
        "seen": len(seen),
        "above": sum(row["minimum"] > row["sighting"] for row in seen),
        "equal": sum(row["minimum"] == row["sighting"] for row in seen),
        "over_floor": sum(row["minimum"] > row["floor"] for row in wrong),
        "over_limit": len(limits),
        "limited": [f"{count} {name}" for name, count in groups.most_common()],
    }


def _larger(measured: Sequence[Row], name: str) -> int:
    """Pairs for which a kind of condition gave a larger minimum than the one that runs first."""
    wrong = [row["largest_wrong_by"][name] for row in measured]
    first = _FIRST[name]
    return sum(max(by.values()) > by[first] for by in wrong if first in by)


def _minima(measured: Sequence[Row]) -> list[list[str]]:
    """Minima by producer, and by pipe and operand of the consumer."""
    cells: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in measured:
        if not reason_to_drop(row) and not row["joint"]:
            role = row["coarse"].partition("|")[2]
            cells[row["pair"].partition("|")[0]][role].add(row["minimum"])
    by_line: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for producer, roles in cells.items():
        by_line[tuple(_range(roles.get(role, set())) for role in _COLUMNS)].append(producer)
    return sorted([", ".join(sorted(names)), *line] for line, names in by_line.items())


def _range(values: set[int]) -> str:
    if not values:
        return "–"
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def _orders(rows: Iterable[Row]) -> Row:
    """Cases in which code waits for the later of two instructions of a unit, and controls."""
    kinds: dict[bool, list[Row]] = {True: [], False: []}
    for row in rows:
        kinds[row["is_control"]].append(row)
    telling = [row for row in kinds[False] if row["uncovered_wrong"]]
    broken = [row for row in telling if row["covered_wrong"]]
    return {
        "cases": len(kinds[False]),
        "telling": len(telling),
        "ordered": len(telling) - len(broken),
        "caught": sum(row["covered_wrong"] > 0 for row in kinds[True]),
        "controls": len(kinds[True]),
        "broken": broken,
    }
