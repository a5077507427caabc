"""Parts of the page on serving: prefix groups, the best GEMM candidates, and the plan search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render, source
from benchmarks.serving.attention.prefix_groups import Case
from benchmarks.serving.host_tables import saved_ns
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.space import plan_of
from nostall.serving.tables.columns import PREFIX_ROWS
from nostall.serving.tables.costs import LEAST_SAVED_NS
from nostall.serving.tables.host import build_tables

FOLDER = results("serving")
PREFIXES = FOLDER / "prefix_groups_h200.json.gz"
CHECK = FOLDER / "kernel_check_prefixes.json"
GEMM_BEST = FOLDER / "gemm_best_h200.json.gz"
SEARCH = FOLDER / "plan_search_h200.json"
SEARCH_FROM_RULE = FOLDER / "plan_search_from_rule_h200.json"

Row = Mapping[str, Any]
RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))
"""Ranges of M."""
SMS = 132
"""Of an H100 and an H200."""
PLANS = ("together", "together, 16 rows", "together, 128 rows")


def prefixes() -> str:
    """Time of batches that share a prefix, by plans with and without groups."""
    rows = load(PREFIXES)["results"]
    judged = [_judged(row) for row in rows]
    grouped = [case["gain"] for case in judged if case["is_grouped"]]
    rejected = [case for case in judged if not case["is_grouped"]]
    values = {
        "gpu": rows[0]["gpu"],
        "prefixes_file": PREFIXES,
        "plans": PLANS,
        "judged": judged,
        "least_saved_us": LEAST_SAVED_NS / 1e3,
        "grouped": grouped,
        "rejected": [f"{case['name']} ({case['gain']:.2f})" for case in rejected],
        "lost": max(rejected, key=lambda case: case["gain"]),
        **_checked(),
    }
    return render(__file__, values)


def _judged(row: Row) -> Row:
    """A batch that was measured, with the decision of the rule for the plan that was measured.

    ``gain`` is the time apart over that with groups, ``saved_us`` the modelled time of each program
    that groups save.
    """
    times = {name: median(samples) for name, samples in row["samples_us"].items()}
    case, heads = Case(**row["case"]), "/".join(map(str, row["heads"]))
    plan = replace(plan_of(row["plans"]["together"]), least_saved_ns=LEAST_SAVED_NS)
    settings = plan.table_settings(AttentionShape(*row["heads"], has_prefixes=True), SMS)
    batch = case.batch()
    gains = [times["apart"] / times[name] for name in PLANS]
    return {
        "name": f"{heads} {case.name}",
        "heads": heads,
        "case": case,
        "apart_us": times["apart"],
        "gains": gains,
        "gain": gains[0],
        "saved_us": saved_ns(batch.query_lengths, batch.prefix_groups[0], settings) / 1e3,
        "is_grouped": bool(build_tables(batch, settings).counts[PREFIX_ROWS]),
    }


def _checked() -> Row:
    """Which checks of groups ran on a GPU."""
    rows = load(CHECK)["results"]
    plain = [row for row in rows if not row["memcheck"]]
    checked = [row for row in rows if row["memcheck"]]
    return {
        "batches": sum(row["cases"] for row in plain),
        "planned": sum(row["planned"] for row in plain),
        "plain": plain,
        "wrong": sum(len(row["wrong"]) for row in rows),
        "with_groups": [f"*{row['variant']}*" for row in plain if "prefixes" in row["variant"]],
        "under_memcheck": [f"*{row['variant']}* ({row['cases']})" for row in checked],
        "errors": sum(row["memory_errors"] for row in checked),
        "check_file": CHECK,
    }


def best_candidates() -> str:
    """The deployed GEMM table beside the best candidate of each point."""
    content = source(GEMM_BEST)
    points = content["points"]
    ranges = [_range(points, low, high) for low, high in (*RANGES, (1, 4096))]
    reached = max(point["m"] for point in points if point["entry"] != "Cublas")
    above = [row["left"] for row in ranges if row["low"] > reached]
    values = {
        "sizes": len({point["m"] for point in points}),
        "reached": reached,
        "above": above,
        "ranges": ranges,
    }
    return render(__file__, {**content, **values}, "best candidates")


def _range(points: Sequence[Row], low: int, high: int) -> Row:
    """Gains over F.linear in a range of M: of the table, of the best, and what is left."""
    own = [point for point in points if low <= point["m"] <= high]
    times = [point["samples_us"] for point in own]
    deployed = geometric_mean(median(us["linear"]) / median(us["deployed"]) for us in times)
    best = geometric_mean(1 / point["best"]["ratio"] for point in own)
    return {
        "low": low, "high": high, "count_of_points": len(own), "deployed": deployed, "best": best,
        "left": best / deployed - 1,
    }  # fmt: skip


def plan_search() -> str:
    """What the search for plans found on a GPU."""
    content, later = load(SEARCH), load(SEARCH_FROM_RULE)
    found = [_found(line) for line in content["printed"].values()]
    least, most = min(found, key=lambda kind: kind.ratio), max(found, key=lambda kind: kind.ratio)
    languages = {row["plan"]["kernel"]["language"].capitalize() for row in content["stored"]}
    values = {
        "seconds": content["command"].partition("--seconds ")[2],
        "stored": content["stored"],
        "languages": " and ".join(sorted(languages)),
        "most": most,
        "most_gain": most.ratio - 1,
        "least": least,
        "least_gain": max(least.ratio, 1 / least.ratio) - 1,
        "is_slower": least.ratio < 1,
        "later": later,
        "later_seconds": later["command"].partition("--seconds ")[2],
        "search_file": SEARCH,
        "later_file": SEARCH_FROM_RULE,
        "found": found,
        "again": [_found(line) for line in later["printed"].values()],
    }
    return render(__file__, values, "plan search")


class FoundPlan(NamedTuple):
    """What the search prints for a kind of batch."""

    kind: str
    plans: str
    ratio: float
    """Time of the rule's plan / time of the best."""
    shown: str
    """The ratio with its interval."""


def _found(line: str) -> FoundPlan:
    kind, _, rest = line.partition(": ")
    plans, _, shown = rest.partition(" plans; rule / best: ")
    return FoundPlan(kind, plans, float(shown.split()[0]), shown)
