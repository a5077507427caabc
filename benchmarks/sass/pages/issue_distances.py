"""Write ``docs/results/issue-distances.md``: issue distances and orders measured on a GPU.

python -m benchmarks page issue-distances
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.sass.distances.table import reason_to_drop
from nostall.core.files.atomic import write_atomically

PAGE = PAGES / "issue-distances.md"
FOLDER = results("sass")
DISTANCES = FOLDER / "measured_distances.json.gz"
WITNESSES = FOLDER / "witnesses.json.gz"
SLACK = FOLDER / "freed_slack.json"
_COLUMNS = ("int:data", "fma:data", "half:data", "double:data", "mma:data", "HMMA:accumulator",
            "lsu:data", "lsu:address", "const:address", "xu:data", "uniform:data",
            "guard")  # fmt: skip
_TITLES = {"HMMA:accumulator": "HMMA c"}

Row = Mapping[str, Any]


def text() -> str:
    """The whole page."""
    content = load(DISTANCES)
    rows = content["rows"]
    return page(
        "Issue distances, measured",
        "python -m benchmarks page issue-distances",
        [
            _introduction(content),
            _pairs(rows),
            _compilers(rows),
            _conditions(rows),
            _minima(rows),
            _witnesses(),
            _slack(),
        ],
    )


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def _introduction(content: Mapping[str, Any]) -> str:
    gpu = content["gpu"]["gpu"]
    return wrapped(
        f"Micro-kernels on {gpu} ({content['gpu']['architecture']}) issue a fixed-latency producer "
        "and a consumer of its result at decreasing distances until the consumer reads the old "
        "value. The minimum is the smallest distance at which all results were right. "
        "[Measured distances](../explanation/safety.md#measured-distances) says what the verifier "
        "makes of them. (`python -m benchmarks run sass.measured_distances`, "
        f"{link(DISTANCES)})"
    )


def _pairs(rows: Sequence[Row]) -> str:
    reasons = Counter(reason_to_drop(row).partition(":")[0] for row in rows)
    kept = reasons.pop("", 0)
    lines = [[reason, f"{count:,}"] for reason, count in reasons.most_common()]
    intro = wrapped(
        f"Of {len(rows):,} pairs, {kept:,} have a minimum: a shorter distance gave the old value, "
        "and the minimum gave the new one although the clock showed no delay. The others give no "
        "evidence for a smaller distance:"
    )
    return f"## Pairs\n\n{intro}\n\n{table(('reason', 'pairs'), lines)}"


def _compilers(rows: Sequence[Row]) -> str:
    seen = [row for row in _measured(rows) if row["sighting"] is not None]
    above = sum(row["minimum"] > row["sighting"] for row in seen)
    equal = sum(row["minimum"] == row["sighting"] for row in seen)
    wrong = [row for row in _measured(rows) if row["largest_wrong"] and not row["joint"]]
    floors = sum(row["minimum"] > row["floor"] for row in wrong)
    limits = [row for row in wrong if row["minimum"] > row["safe"]]
    groups = Counter(row["coarse"].replace("|", " → ") for row in limits)
    named = ", ".join(f"{count} {name}" for name, count in groups.most_common())
    return "## Beside compiler output\n\n" + wrapped(
        f"For {len(seen):,} of the pairs, compilers left a distance that nothing else protects. "
        f"The minimum is above it for {above}, equal for {equal:,}, and below for the others. For "
        f"{floors:,} pairs, results were wrong at the floor of their class, and for {len(limits)} "
        f"at the limit of changed schedules ({named}). Those measurements raise the floors and "
        "limits of the verifier."
    )


def _conditions(rows: Sequence[Row]) -> str:
    parts = []
    for name, title in (("alignment", "code alignment"), ("warps", "number of warps"),
                        ("spacing", "way of spacing")):  # fmt: skip
        differ = sum(
            max(row["largest_wrong_by"][name].values()) > row["largest_wrong_by"][name][alone]
            for row in _measured(rows)
            if (alone := _first(row["largest_wrong_by"][name])) is not None
        )
        parts.append(f"{differ:,} ({title})")
    return wrapped(
        "Conditions that gave a larger minimum than the first one, in pairs: "
        f"{', '.join(parts)}. Warps that run another stream of instructions only delay the pair, "
        "which makes it right more often."
    )


def _first(table: Mapping[str, int]) -> str | None:
    """The condition that runs first: alignment 0, one warp, the plain stall."""
    return next((name for name in ("0", "1", "stall") if name in table), None)


def _measured(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "problem" not in row and row["kind"] == "RAW"]


def _minima(rows: Sequence[Row]) -> str:
    cells: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in _measured(rows):
        if not reason_to_drop(row) and not row["joint"]:
            role = row["coarse"].partition("|")[2]
            cells[row["pair"].partition("|")[0]][role].add(row["minimum"])
    by_line: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for producer, roles in cells.items():
        by_line[tuple(_range(roles.get(role, set())) for role in _COLUMNS)].append(producer)
    lines = [[", ".join(sorted(names)), *line] for line, names in by_line.items()]
    lines.sort()
    intro = wrapped(
        "Minima in cycles, by producer and by pipe and operand of the consumer; a range if the "
        "operands of a pipe differ. `>R`, `>P`, `>UR`, `>UP`: register file of the result; `+0`, "
        "`+1`: word of a wide result. Producers with equal rows share one."
    )
    head = ("producer", *(_TITLES.get(role, role.replace(":", " ")) for role in _COLUMNS))
    return f"## Minima\n\n{intro}\n\n{table(head, lines)}"


def _range(values: set[int]) -> str:
    if not values:
        return "–"
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def _witnesses() -> str:
    rows = [row for row in load(WITNESSES)["rows"] if "problem" not in row]
    cases = [row for row in rows if not row["is_control"]]
    controls = [row for row in rows if row["is_control"]]
    shown = [row for row in cases if row["uncovered_wrong"]]
    broken = [row for row in shown if row["covered_wrong"]]
    caught = sum(row["covered_wrong"] > 0 for row in controls)
    intro = wrapped(
        "Two instructions of one unit issue in order, and code waits for the scoreboard of the "
        "later one only. If the unit completes in order, the wait covers the earlier one too. Each "
        "case also runs without any wait: only if that gives wrong results can the case show "
        f"something. Of {len(cases)} cases, {len(shown)} can; {len(shown) - len(broken)} kept the "
        f"order in all results. {caught} of {len(controls)} controls, pairs of two units whose "
        f"order differs, were found wrong. ({link(WITNESSES)})"
    )
    lines = [
        [row["case"], f"{row['covered_wrong']:,}", f"{row['uncovered_wrong']:,}",
         f"{row['results']:,}"]
        for row in broken
    ]  # fmt: skip
    head = ("order that is not kept", "wrong", "wrong without wait", "results")
    return f"## Orders of units\n\n{intro}\n\n{table(head, lines)}"


def _slack() -> str:
    record = load(SLACK)["summary"]
    shares = {part: 100 * record[f"freed_share_{part}"] for part in ("mined", "measured")}
    return "## What the distances free\n\n" + wrapped(
        f"In {record['kernels']} compiled kernels, in the compiler's order, each stall was lowered "
        f"to the least that is legal. With the distances of compiler output that removes "
        f"{shares['mined']:.2f} % of {record['stalls']:,} stall cycles, with measured distances "
        f"{shares['measured']:.2f} %; {record['kernels_with_more']} kernels gain. Measured "
        f"distances weaken {record['lowered']:,} of {record['constraints']:,} constraints of more "
        f"than one cycle. No time was measured. (`python -m benchmarks run sass.freed_slack`, "
        f"{link(SLACK)})"
    )
