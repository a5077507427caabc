"""``docs/results/assembler.md``: what a search of the input of ptxas gains on a GPU.

python -m benchmarks page assembler
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import read
from benchmarks.harness.template import render_page, source
from benchmarks.ptx.page_sections import sections
from nostall.report.tune.change_words import setting_words

PAGE = PAGES / "assembler.md"
FOLDER = results("ptx")
SUITE = FOLDER / "assembler_suite.json"
FILLING = FOLDER / "assembler_filling.json"
UNSEEN = FOLDER / "unseen_suite.json"
LOW_BUDGETS = FOLDER / "assembler_low_budgets.json"
"""Kernels of the other files, searched without register budgets above the original's number."""
RANKED = results("sass") / "suite.json.gz"
"""Measured on the card that ranked the compiler's configurations."""
PEERS = FOLDER / "assembler_peers.json"
ABLATION = FOLDER / "assembler_ablation.json"
LONG = FOLDER / "assembler_long.json"
CHAINS = FOLDER / "dependent_launch.json"
_DROPPED = {
    "wrong": "gave other outputs",
    "fault": "faulted",
    "hang": "did not end",
    "hazards": "had hazards in their machine code",
    "unsafe": "were rejected by the verifier of machine code",
    "unproved": "had PTX that the validator could not prove",
    "serialized": "got a message of ptxas about lost asynchronous execution",
    "error": "were rejected by ptxas",
}
"""Counted result -> why such candidates were dropped."""
_FIGURES = ("order", "wait", "best", "triton")
"""Ways of launching a chain, in the order of the columns."""

Row = Mapping[str, Any]

GROUPS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("published small shapes", lambda r: r["set"] == "published"),
    ("their mma kernels", lambda r: r["set"] == "published" and r["kernel"].endswith("@mma")),
    ("their wgmma kernels", lambda r: r["set"] == "published" and r["kernel"].endswith("@wgmma")),
    ("shapes that fill the GPU", lambda r: r["set"] == "filling"),
    ("kernels not developed with", lambda r: r["set"] == "unseen"),
)
"""Groups of kernels of the summary."""


class Target(NamedTuple):
    """A target for the geometric mean of a group of searches, or for their best."""

    title: str
    group: str
    """Title of the group of kernels (:data:`GROUPS`)."""
    is_best: bool
    over_a: float
    goal: float
    over_b: float | None


TARGETS = (
    Target("published small shapes", "published small shapes", False, 1.05, 1.09, 1.03),
    Target("their mma kernels", "their mma kernels", False, 1.08, 1.15, 1.05),
    Target("their wgmma kernels", "their wgmma kernels", False, 1.01, 1.04, 1.01),
    Target("best published kernel", "published small shapes", True, 1.13, 1.26, 1.10),
    Target("shapes that fill the GPU", "shapes that fill the GPU", False, 1.02, 1.05, None),
)
"""Required over (a), goal over (a), required over (b).

The goals for the published shapes are CuAsmRL's average and best (arXiv:2501.08071, abstract).
"""


def text() -> str:
    """The whole page."""
    rows = all_rows()
    groups = [_group(title, list(filter(belongs, rows))) for title, belongs in GROUPS]
    chains = load(CHAINS)["records"]
    orders = [100 * geometric_mean(group["over_b"]) - 100 for group in groups]
    others = {path: load(path)["records"] for path in (LOW_BUDGETS, ABLATION, LONG, PEERS)}
    # Searches with other settings and beside peers are in no table of gains.
    searches = [*rows, *(r for found in others.values() for r in found if "dropped" in r)]
    values = {
        **_origin(rows),
        "groups": groups,
        "targets": _judged_targets(groups, _over_all(chains, "best")),
        "orders": orders,
        "kernels": [_kernel(row) for row in rows],
        **_chains(chains),
        "sections": sections(
            rows,
            (LOW_BUDGETS, others[LOW_BUDGETS]),
            (ABLATION, others[ABLATION]),
            (LONG, others[LONG]),
            (PEERS, _with_assembler(others[PEERS], rows)),
        ),
        **_candidates(searches),
        "validator": source(FOLDER / "validator.json"),
    }
    return render_page(__file__, PAGE, values)


def all_rows() -> list[Row]:
    """Records of the assembler in all files, each with its set of kernels."""
    files = (("published", SUITE), ("filling", FILLING), ("unseen", UNSEEN))
    rows = [{**row, "set": name} for name, path in files for row in load(path)["records"]]
    return [row for row in rows if row["method"] == "assembler"]


def _with_assembler(peers: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The records of peers, with those of the assembler for the same kernels and seeds."""
    wanted = {(row["kernel"], row["seed"]) for row in peers}
    known = {(row["kernel"], row["seed"]) for row in peers if row["method"] == "assembler"}
    own = [row for row in rows if (row["kernel"], row["seed"]) in wanted - known]
    return [*peers, *own]


def order_gain(row: Row) -> float:
    """Deployed gain of the order alone, over the best of name, options and budgets."""
    over = row.get("over_b")
    return float(over["ratio"]) if over and over["verdict"] == "faster" else 1.0


def _origin(rows: Sequence[Row]) -> Row:
    """GPUs, seconds, seeds, and the baselines that were timed anew."""
    return {
        "gpus": " and ".join(sorted({row["gpu"]["gpu"] for row in rows})),
        "drivers": " and ".join(sorted({row["gpu"]["driver_version"] for row in rows})),
        "seconds": [row["seconds_searched"] for row in rows],
        "seeds": sorted({str(row["seed"]) for row in rows}),
        "retimed": [len(row["baseline"]) or 1 for row in rows],
        "other_card": _other_card([row for row in rows if row["set"] == "filling"]),
        "suite_files": [SUITE, FILLING, UNSEEN],
    }


def _other_card(filling: Sequence[Row]) -> Row:
    """How many kernels were searched on another card than that of their ranking."""
    (ranked,) = {record.gpu for record in read(RANKED).records}
    apart = [row for row in filling if row["gpu"]["gpu"] != ranked]
    return {
        "apart": len(apart),
        "filling": len(filling),
        "card": _card(apart[0]),
        "ranked": ranked,
    }


def _card(row: Row) -> str:
    return str(row["gpu"]["gpu"]).removeprefix("NVIDIA ").split()[0]


def _group(title: str, rows: Sequence[Row]) -> Row:
    """Deployed ratios of a group of searches over both baselines."""
    return {
        "title": title,
        "kernels": len({row["kernel"] for row in rows}),
        "over_a": [row["deployed"] for row in rows],
        "over_b": [order_gain(row) for row in rows],
    }


def _judged_targets(groups: Iterable[Mapping[str, Any]], chains: float) -> list[list[str]]:
    """The targets, and which are met.

    ``groups``: deployed ratios over (a) and (b), with titles; ``chains``: geometric mean of chains
    of dependent launches.
    """
    by_title = {group["title"]: group for group in groups}
    rows = []
    for target in TARGETS:
        of = max if target.is_best else geometric_mean
        over_a, over_b = (of(by_title[target.group][key]) for key in ("over_a", "over_b"))
        rows.append([
            target.title, *_judged(over_a, target.over_a), *_judged(over_a, target.goal),
            *(_judged(over_b, target.over_b) if target.over_b else ("–", "–")),
        ])  # fmt: skip
    return [
        *rows,
        ["chains back to back", *_judged(chains, 1.08), *_judged(chains, 1.15), "–", "–"],
    ]


def _judged(ratio: float, target: float) -> tuple[str, str]:
    return f"{target:.2f}", f"{'yes' if ratio >= target else 'no'}: {ratio:.3f}"


def _kernel(row: Row) -> Row:
    """A search of one kernel."""
    interval = null = None
    if over := row.get("over_a"):
        interval = f"{over['low']:.3f} to {over['high']:.3f}"
        null = f"{over['null_low']:.4f} to {over['null_high']:.4f}"
    levers = row["search"].get("winner", {}).get("levers", []) if row["deployed"] > 1 else []
    return {
        **row,
        "card": _card(row),
        "interval": interval,
        "null": null,
        "over_b": order_gain(row),
        "candidate": "; ".join(map(setting_words, levers)) or "none faster",
    }


def _chains(rows: Sequence[Row]) -> Row:
    """Kernels back to back with dependent launch; the figures of isolated launches are above."""
    full = [row for row in rows if all(row["figures"].get(name) for name in _FIGURES)]
    return {
        "chain_gpus": " and ".join(sorted({row["gpu"]["gpu"] for row in rows})),
        "chains_file": CHAINS,
        "chains": [
            {**row, "deployed": [_deployed(row["figures"][name]) for name in _FIGURES]}
            for row in full
        ],
        "chain_means": [_over_all(full, name) for name in _FIGURES],
    }


def _over_all(rows: Sequence[Row], name: str) -> float:
    """Geometric mean of the deployed ratios of one way of launching."""
    figures = (row["figures"].get(name) for row in rows)
    return geometric_mean(_deployed(figure) for figure in figures if figure)


def _deployed(figure: Row) -> float:
    """A ratio as the page shows it, or 1 where the gain is not beyond the noise."""
    return round(figure["ratio"], 3) if figure["verdict"] == "faster" else 1.0


def _candidates(rows: Sequence[Row]) -> Row:
    """What became of the candidates of all searches."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    return {
        "counts": counts,
        "dropped": [f"{counts[name]:,} {why}" for name, why in _DROPPED.items()],
        "idle": [row["search"]["idle_share"] for row in rows],
        "workers": [row["search"]["workers"] for row in rows],
    }
