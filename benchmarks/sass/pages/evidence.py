"""The generated tables of ``docs/explanation/verifier-evidence.md``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from benchmarks.harness.markdown import region, table, wrapped
from benchmarks.harness.result_file import ROOT, load, results
from nostall.core.files.atomic import write_atomically
from nostall.sass.program.cover_rules import LEAST_WITNESSES, Claim, ordered_pairs
from nostall.sass.safety.latency import FAMILY
from nostall.sass.safety.rules import RULES

PAGE = ROOT.parent / "docs" / "explanation" / "verifier-evidence.md"
FOLDER = results("sass")

_CLAIMS = {
    Claim.RESULT: "results are written in order",
    Claim.SOURCES: "sources are read in order",
    Claim.DRAINS_SOURCES: "a blocking BAR waits for earlier sources",
    Claim.PARTIAL_WAIT: "DEPBAR with a count proves all but the last",
    Claim.READ_PROVES_PREDICATE: "the read scoreboard proves the predicate",
}


def text(page: str) -> str:
    """The page with new tables."""
    page = region(page, "rules", _rules())
    page = region(page, "in-order", _in_order(load(FOLDER / "cover_rules.json")["rules"]))
    page = region(page, "witnessed", _witnessed(_witness_counts()))
    cost = load(FOLDER / "mobility.json")["cost_of_witnesses"]
    page = region(page, "mobility", _mobility(cost))
    page = region(page, "halves", _halves(load(FOLDER / "seeded_hazards.json")))
    page = region(page, "false-alarms", _false_alarms(load(FOLDER / "false_alarms.json")))
    return region(page, "architectures", _architectures())


def write() -> None:
    """Write the tables into the page."""
    write_atomically(PAGE, text(PAGE.read_text("utf-8")).encode())


def _rules() -> str:
    rows = [
        (
            f"`{r.kind}`",
            r.requirement,
            "original" if r.relative else "any cubin",
            r.evidence,
            r.source,
        )
        for r in RULES
    ]
    return table(("finding", "what must hold", "compared with", "evidence", "source"), rows)


def _in_order(records: Iterable[Mapping[str, Any]]) -> str:
    """Table of the in-order rules: groups, witnesses and architectures."""
    rows = []
    for record in records:
        pair = record["rule"].partition(": ")[2]
        architectures = " ".join(str(sm) for sm in record["architectures"])
        witness = record["witnesses"][0].rpartition("/")[2] if record["witnesses"] else "–"
        need = f"{record['functions_that_need_it']} of {record['functions_that_can_use_it']}"
        rows.append((_CLAIMS[Claim(record["claim"])], pair, need, architectures, f"`{witness}`"))
    head = ("order", "queue", "functions that need it", "architectures", "a witness")
    return table(head, rows)


def _witness_counts() -> list[Mapping[str, Any]]:
    """The rows of ``witnessed_pairs.json``."""
    text = resources.files("nostall.sass.program").joinpath("witnessed_pairs.json").read_text()
    rows: list[Mapping[str, Any]] = json.loads(text)["pairs"]
    return rows


def _witnessed(rows: Iterable[Mapping[str, Any]]) -> str:
    """Table of the pairs with witnesses, one row for each later group."""
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
    lines = [
        (_CLAIMS[Claim(order)], later, ", ".join(earlier) or "–", str(others[order, later]))
        for (order, later), earlier in sorted(known.items())
    ]
    head = ("order", "later", "earlier (functions that need the order)", "other pairs")
    return table(head, lines)


def _mobility(cost: Mapping[str, Any]) -> str:
    """What the rule about witnesses costs in moves."""
    return wrapped(
        f"In {cost['functions']} functions of the corpus {cost['slides']:,} moves are offered. "
        f"If each pair had witnesses, {cost['slides_with_whole_queues']:,} would be; "
        f"{cost['functions_with_fewer']} functions have fewer moves with the rule. A pair without "
        "witnesses takes moves away where the original relies on it, and gives moves where it only "
        "seems to protect something. (`python -m benchmarks run sass.mobility`, "
        "[JSON](../../benchmarks/sass/results/mobility.json))"
    )


def _halves(seeded: Mapping[str, Any]) -> str:
    """Table of what each half of the verifier refuses alone."""
    judged = seeded["judged_by_both_halves"]
    rows = [
        (name, f"{seeded['total'][key]:,} of {judged:,}", f"{100 * seeded[f'{key}_rate']:.1f} %")
        for name, key in (("hazard validator", "hazards"), ("symbolic execution", "symbolic"))
    ]
    everything = seeded["total"]
    refused, mutants = everything["refused"], everything["mutants"]
    rows.append(("all parts", f"{refused:,} of {mutants:,}", f"{100 * refused / mutants:.1f} %"))
    return table(("part", "violations refused", "share"), rows)


def _false_alarms(result: Mapping[str, Any]) -> str:
    """Table of the functions of held-out libraries that are refused, by half and architecture."""
    summary = result["summary"]
    unseen = summary["unseen"]
    parts = {"unseen half": unseen, "examined half": summary["examined"]}
    rows = [
        (name, f"{part['functions']:,}", str(part["refused"]), f"{part['refused_percent']:.2f} %")
        for name, part in parts.items()
        if part["functions"]
    ]
    for kind, key in (("", "by_architecture"), ("CUDA ", "by_cuda"), ("", "by_library")):
        for name, (functions, refused) in unseen[key].items():
            share = 100 * refused / functions
            rows.append((f"unseen, {kind}{name}", f"{functions:,}", str(refused), f"{share:.2f} %"))
    return table(("functions", "number", "refused", "share"), rows)


def _architectures() -> str:
    """Table of the evidence for each architecture."""
    rules = load(FOLDER / "cover_rules.json")["rules"]
    witnessed = Counter(sm for rule in rules for sm in rule["architectures"])
    executed = load(FOLDER / "witnesses.json.gz")
    on_gpu = int(executed["gpu"]["architecture"].removeprefix("sm_"))
    kept = [r for r in executed["rows"] if not r["is_control"] and not r["covered_wrong"]]
    walks = load(FOLDER / "random_walks_on_gpu.json")
    what_ran = (
        f"{walks['walks']:,} random walks, {walks['wrong']} wrong; "
        f"{len(kept)} orders of units kept in all results"
    )
    rows = []
    for sm, family in FAMILY.items():
        floors = resources.files("nostall.sass.safety").joinpath("floors")
        mined = json.loads(floors.joinpath(f"sm_{family}.json").read_text())
        libraries = json.loads(floors.joinpath("libraries", f"sm_{family}.json").read_text())
        rows.append(
            (
                f"sm_{sm}",
                f"{mined['cubins']:,} cubins, {mined['instructions']:,} instructions (sm_{family})",
                f"{libraries['functions']:,} (sm_{family})",
                f"{witnessed[sm]} of {len(rules)}",
                what_ran if sm == on_gpu else "nothing",
            )
        )
    head = (
        "architecture",
        "distances mined from",
        "functions of libraries",
        "in-order rules with a witness",
        "executed",
    )
    return table(head, rows)
