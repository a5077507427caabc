"""The generated tables of ``docs/explanation/verifier-evidence.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from benchmarks.harness.markdown import region
from benchmarks.harness.result_file import ROOT, load, results
from benchmarks.harness.template import render
from nostall.core.files.atomic import write_atomically
from nostall.sass.program.cover_rules import LEAST_WITNESSES, Claim, ordered_pairs
from nostall.sass.safety.latency import FAMILY
from nostall.sass.safety.verdict import RULES

PAGE = ROOT.parent / "docs" / "explanation" / "verifier-evidence.md"
FOLDER = results("sass")
REGIONS = ("rules", "in-order", "witnessed", "mobility", "halves", "false-alarms", "architectures")
"""Regions of the page, and parts of the template."""

_CLAIMS = {
    Claim.RESULT: "results are written in order",
    Claim.SOURCES: "sources are read in order",
    Claim.DRAINS_SOURCES: "a blocking BAR waits for earlier sources",
    Claim.PARTIAL_WAIT: "DEPBAR with a count proves all but the last",
    Claim.READ_PROVES_PREDICATE: "the read scoreboard proves the predicate",
}

Row = Mapping[str, Any]


def text(page: str) -> str:
    """The page with new tables."""
    cover_rules = load(FOLDER / "cover_rules.json")["rules"]
    seeded = load(FOLDER / "seeded_hazards.json")
    values = {
        "rules": RULES,
        "in_order": [_in_order(record) for record in cover_rules],
        "witnessed": list(_witnessed()),
        "cost": load(FOLDER / "mobility.json")["cost_of_witnesses"],
        "mobility_file": FOLDER / "mobility.json",
        "seeded": seeded,
        "refused_share": seeded["total"]["refused"] / seeded["total"]["mutants"],
        "false_alarms": list(_false_alarms(load(FOLDER / "false_alarms.json")["summary"])),
        "cover_rules": len(cover_rules),
        "architectures": list(_architectures(cover_rules)),
    }
    for name in REGIONS:
        page = region(page, name, render(__file__, values, name))
    return page


def write() -> None:
    """Write the tables into the page."""
    write_atomically(PAGE, text(PAGE.read_text("utf-8")).encode())


def _in_order(record: Row) -> Row:
    """An in-order rule: groups, witnesses and architectures."""
    return {
        **record,
        "order": _CLAIMS[Claim(record["claim"])],
        "queue": record["rule"].partition(": ")[2],
        "sms": " ".join(map(str, record["architectures"])),
        "witness": record["witnesses"][0].rpartition("/")[2] if record["witnesses"] else "–",
    }


def _json(package: str, *names: str) -> Any:
    """Parsed JSON of a file that a package ships."""
    return json.loads(resources.files(package).joinpath(*names).read_text())


def _witnessed() -> Iterator[Row]:
    """The pairs with witnesses, one row for each later group."""
    rows = _json("nostall.sass.program", "witnessed_pairs.json")["pairs"]
    counts = {(row["order"], row["later"], row["earlier"]): row["functions"] for row in rows}
    known: dict[tuple[str, str], list[str]] = {}
    others: Counter[tuple[str, str]] = Counter()
    for order, earlier, later in sorted(ordered_pairs()):
        functions = counts.get((order.value, later, earlier), 0)
        listed = known.setdefault((order.value, later), [])
        if functions >= LEAST_WITNESSES:
            listed.append(f"{earlier} ({functions})")
        else:
            others[order.value, later] += 1
    for (order, later), listed in sorted(known.items()):
        yield {
            "order": _CLAIMS[Claim(order)],
            "later": later,
            "earlier": ", ".join(listed) or "–",
            "others": others[order, later],
        }


def _false_alarms(summary: Row) -> Iterator[Row]:
    """The functions of held-out libraries that are refused, by half and architecture."""
    unseen = summary["unseen"]
    for name, part in (("unseen half", unseen), ("examined half", summary["examined"])):
        if part["functions"]:
            yield {**part, "name": name, "percent": part["refused_percent"]}
    for kind, key in (("", "by_architecture"), ("CUDA ", "by_cuda"), ("", "by_library")):
        for name, (functions, refused) in unseen[key].items():
            yield {
                "name": f"unseen, {kind}{name}",
                "functions": functions,
                "refused": refused,
                "percent": 100 * refused / functions,
            }


def _architectures(cover_rules: list[Row]) -> Iterator[Row]:
    """The evidence for each architecture."""
    witnessed = Counter(sm for rule in cover_rules for sm in rule["architectures"])
    executed = load(FOLDER / "witnesses.json.gz")
    on_gpu = int(executed["gpu"]["architecture"].removeprefix("sm_"))
    kept = [r for r in executed["rows"] if not r["is_control"] and not r["covered_wrong"]]
    walks = load(FOLDER / "random_walks_on_gpu.json")
    what_ran = (
        f"{walks['walks']:,} random walks, {walks['wrong']} wrong; "
        f"{len(kept)} orders of units kept in all results"
    )
    for sm, family in FAMILY.items():
        floors = f"sm_{family}.json"
        yield {
            "sm": sm,
            "family": family,
            "mined": _json("nostall.sass.safety", "floors", floors),
            "libraries": _json("nostall.sass.safety", "floors", "libraries", floors),
            "witnessed": witnessed[sm],
            "executed": what_ran if sm == on_gpu else "nothing",
        }
