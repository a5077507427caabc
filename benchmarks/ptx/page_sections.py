"""Sections of ``docs/results/assembler.md``: register budgets, other GPUs, stall reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render
from benchmarks.kernels.new_projects.entries import PROJECTS
from benchmarks.ptx.compilers.regression_times import SLOWER, lost, shown
from benchmarks.ptx.search_comparison import (
    comparison_entries,
    mean_ratio,
    mean_rows,
    present_strategies,
)

Row = Mapping[str, Any]
File = tuple[Path, Sequence[Row]]
"""A result file and its records."""
TRANSFER = results("ptx") / "transfer.json"
STALLS = results("ptx") / "stall_reasons.json"
REGRESSIONS = results("ptx") / "regressions.json.gz"
TIMES = results("ptx") / "regression_times.json.gz"
FREEDOM = results("ptx") / "freedom.json"
CONVERSIONS = results("ptx") / "conversions.json"
COMPARISON = results("ptx") / "search_comparison.json"
FILLING_AGAIN = results("ptx") / "filling_orders.json"
UNSEEN_KERNELS = results("ptx") / "unseen_kernels.json"
REPORTED = results("ptx") / "reported_regressions.json"
_SHOWN_STALLS = 3
"""Stall reasons of a kernel: those that changed most."""
PEERS = {
    "assembler": "assembler",
    "spike": "random orders",
    "anneal": "moves of native instructions",
    "sip": "SIP",
    "sip-from-winner": "assembler, then SIP",
    "cuasmrl-from-winner": "assembler, then CuAsmRL",
}
"""Methods beside the assembler, by the word that the table shows."""
VARIANTS = {
    "assembler": "whole, same call",
    "assembler-one-sigma": "one sigma",
    "assembler-all-blocks": "all blocks",
    "assembler-without-recombination": "no recombination",
    "assembler-without-immigrants": "no immigrants",
    "assembler-two-parents": "two parents",
}
"""The whole search and those without a part of the evolution, by the word that the table shows."""


def sections(
    rows: Sequence[Row], low_budgets: File, variants: File, long: File, peers: File
) -> str:
    """The sections from register budgets to stall reasons. ``rows``: all searches above."""
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_kernel[row["kernel"]].append(row["deployed"])
    values = {
        "budgets": _budgets(*low_budgets, by_kernel),
        "ablation": _ablation(*variants, by_kernel),
        "long": {
            "file": long[0],
            "rows": [
                {
                    **row,
                    "short": geometric_mean(by_kernel[row["kernel"]]),
                    "candidates": sum(row["counts"].values()),
                }
                for row in long[1]
            ],
        },
        "peers": _peers(*peers),
        "strategies": _strategies(),
        "unseen": _unseen(),
        "faster": _faster_kinds(rows),
        "reported": _reported(),
        "regressions": _regressions(),
        "times": _regression_times(),
        "freedom": _freedom(),
        "conversions": _conversions(),
        "transfer": _transfer(load(TRANSFER)["kernels"]),
        "stalls": {
            "file": STALLS,
            "rows": {
                name: _changes(row["before"]["waits"], row["after"]["waits"])
                for name, row in load(STALLS)["kernels"].items()
                if "after" in row
            },
        },
    }
    return render(__file__, values)


def _budgets(file: Path, before: Sequence[Row], by_kernel: Mapping[str, Sequence[float]]) -> Row:
    """What register budgets above the original's number add."""
    known = {row["kernel"]: row["deployed"] for row in before}
    rows = [
        {"kernel": name, "below": known[name], "all": geometric_mean(ratios)}
        for name, ratios in by_kernel.items()
        if name in known
    ]
    means = {key: geometric_mean(row[key] for row in rows) for key in ("below", "all")}
    return {"file": file, "rows": [*rows, {"kernel": "geometric mean", **means}]}


def _ablation(file: Path, variants: Sequence[Row], by_kernel: Mapping[str, Sequence[float]]) -> Row:
    """What the parts of the evolution are worth."""
    found = {(row["kernel"], row["method"]): row["deployed"] for row in variants}
    rows = [
        {
            "kernel": kernel,
            "least": min(by_kernel[kernel]),
            "most": max(by_kernel[kernel]),
            "ratios": [found.get((kernel, variant)) for variant in VARIANTS],
        }
        for kernel in dict.fromkeys(row["kernel"] for row in variants)
    ]
    seconds = max(row["seconds_searched"] for row in variants)
    return {"file": file, "seconds": seconds, "variants": list(VARIANTS.values()), "rows": rows}


def _peers(file: Path, records: Sequence[Row]) -> Row:
    """Other methods, each seed in one call of its own."""
    rows, seconds = [], []
    for seed in dict.fromkeys(row["seed"] for row in records):
        found = {(row["kernel"], row["method"]): row for row in records if row["seed"] == seed}
        kernels = list(dict.fromkeys(kernel for kernel, _ in found))
        ratios = [
            [found[kernel, method]["deployed"] if (kernel, method) in found else None
             for method in PEERS]
            for kernel in kernels
        ]  # fmt: skip
        means = [None if None in column else geometric_mean(column)
                 for column in zip(*ratios, strict=True)]  # fmt: skip
        for kernel, cells in zip([*kernels, "geometric mean"], [*ratios, means], strict=True):
            rows.append({"kernel": kernel, "seed": seed, "ratios": cells})
        ours = max(found[kernel, "assembler"]["search"]["search_s"] for kernel in kernels)
        others = [row["search"]["seconds"] for (_, m), row in found.items() if m == "spike"]
        beside = f", random orders {max(others):.0f} s" if others else ""
        seconds.append(f"seed {seed}: the assembler {ours:.0f} s{beside}")
    methods = list(PEERS.values())
    return {"file": file, "methods": methods, "rows": rows, "seconds": "; ".join(seconds)}


def _strategies() -> Row:
    """Searches in turn on each kernel."""
    records = load(COMPARISON)["records"]
    names = present_strategies(records)
    found = {(r["kernel"], r["method"]): r for r in records}
    means = list(mean_rows(records))
    everything = next(m for m in means if m["kernels"] == "all")
    paired = [r for r in records if all((r["kernel"], name) in found for name in names)]
    timed = [
        f"{median(r['counts'].get('timed', 0) for r in paired if r['place'] == place):.0f}"
        for place in (0, len(names) - 1)
    ]
    return {
        "file": COMPARISON,
        "gpus": " and ".join(sorted({r["gpu"]["gpu"] for r in records})),
        "seconds": records[0]["seconds_searched"],
        "means": means,
        "verdict": _verdict(everything),
        "undivided": "{:.4f} to {:.4f}".format(*everything["undivided"]),
        "timed": " and ".join(timed),
        "missing": ", ".join(
            entry.kernel
            for entry in comparison_entries()
            if any((entry.name, name) not in found for name in names)
        ),
        "names": names,
        "rows": [
            {
                **r,
                "us": r["original_us"],
                "project": r["project"] or "(seen)",
                "first": r["method"],
                "ratios": [found[r["kernel"], name]["deployed"] for name in names],
            }
            for r in paired
            if r["place"] == 0
        ],
    }


def by_kernel(rows: Sequence[Row]) -> dict[str, float]:
    """Deployed ratio of each kernel: the geometric mean of its searches.

    Of a kernel with and without wgmma, the one whose fastest compiler configuration is faster.
    """
    kinds: defaultdict[str, dict[str, list[Row]]] = defaultdict(dict)
    for row in rows:
        name, _, kind = row["kernel"].partition("@")
        kinds[name].setdefault(kind, []).append(row)
    chosen = {}
    for name, searches in kinds.items():
        fastest = min(searches.values(), key=lambda found: min(r["original_us"] for r in found))
        chosen[name] = geometric_mean(row["deployed"] for row in fastest)
    return chosen


def _faster_kinds(rows: Sequence[Row]) -> Row:
    """Gains on the suite by the faster kind of each kernel, by evolution and by random orders."""
    again = load(FILLING_AGAIN)
    searches = (
        ("small", "evolution", 1.03, [r for r in rows if r["set"] == "published"]),
        ("that fill the GPU", "evolution", 1.012, [r for r in rows if r["set"] == "filling"]),
        ("that fill the GPU", "random orders", 1.012, again["records"]),
    )
    return {
        "file": FILLING_AGAIN,
        "seconds": again["records"][0]["seconds_searched"],
        "gpus": " and ".join(sorted({r["gpu"]["gpu"] for r in again["records"]})),
        "day": again["date"][:10],
        "rows": [
            {"shapes": shapes, "search": search, "required": required,
             "ratios": list(by_kernel(found).values())}
            for shapes, search, required, found in searches
        ],
        "kernels": [
            {**r, "us": r["original_us"], "order": order_alone(r)} for r in again["records"]
        ],
    }  # fmt: skip


def _unseen() -> Row:
    """What the default search gains on unseen kernels, and the order alone of it."""
    content = load(UNSEEN_KERNELS)
    new = content["records"]
    groups = {
        "all": new,
        "without the best": sorted(new, key=lambda r: r["deployed"])[:-1],
        "with wgmma": [r for r in new if r["instructions"] == "wgmma"],
        "with mma": [r for r in new if r["instructions"] == "mma"],
        "without both": [r for r in new if r["instructions"] is None],
    }
    return {
        "file": UNSEEN_KERNELS,
        "projects": len(PROJECTS),
        "gpus": " and ".join(sorted({r["gpu"]["gpu"] for r in new})),
        "day": content["date"][:10],
        "seconds": new[0]["seconds_searched"],
        "failures": ", ".join(f["kernel"].partition("-")[0] for f in content["failures"]),
        "slower": [r["kernel"] for r in new if order_alone(r) < 1],
        "rows": [
            {
                **r,
                "configurations": max(1, len(r["baseline"])),
                "us": r["original_us"],
                "low": (r["over_a"] or {}).get("low"),
                "high": (r["over_a"] or {}).get("high"),
                "order": order_alone(r),
            }
            for r in sorted(new, key=lambda r: (r["instructions"] or "~", -r["deployed"]))
        ],
        "groups": [
            {
                "kernels": title,
                "number": len(rows),
                **dict(zip(("mean", "low", "high"), _mean_of(rows), strict=True)),
                "best": max(r["deployed"] for r in rows),
                "alike": sum(r["deployed"] == 1 for r in rows),
                "slower": sum(r["deployed"] < 1 for r in rows),
                "order": geometric_mean(map(order_alone, rows)),
            }
            for title, rows in groups.items()
        ],
    }


def order_alone(record: Row) -> float:
    """The result over baseline (b); 1 where no difference was shown."""
    over = record["over_b"]
    return 1.0 if over is None or over["verdict"] == "same" else float(over["ratio"])


def _reported() -> Row:
    """Kernels of public reports that were timed: what the newer binary costs, and what is back."""
    found = load(REPORTED)
    rows = {name: row for name, row in found["rows"].items() if "measured" in row}
    return {
        "file": REPORTED,
        "gpus": " and ".join(sorted({row["measured"]["gpu"]["gpu"] for row in rows.values()})),
        "kernels": len(found["rows"]),
        "rows": [
            {
                "kernel": name,
                "report": "{3}/{4}#{6}".format(*row["report"].split("/")),
                "losses": ", ".join(loss["name"] for loss in row["case"]["losses"]) or "none",
                **row["measured"],
                "beside": (row["measured"]["found"] or {}).get("ratio"),
            }
            for name, row in rows.items()
        ],
    }


def _mean_of(records: Sequence[Row]) -> tuple[float, float, float]:
    """Geometric mean over kernels, with the 95 % interval of a bootstrap over them."""
    return mean_ratio([[r["deployed"] for r in records]])


def _verdict(mean: Row) -> str:
    """Whether evolution beats random orders, and what follows."""
    if mean["low"] > 1:
        return "The interval is above 1: evolution beats random orders."
    beside = "below" if mean["high"] < 1 else "around"
    return (
        f"The interval is {beside} 1: evolution does not beat random orders, so `--strategy "
        "assembler` draws random orders, the simpler of the two."
    )


def _transfer(kernels: Mapping[str, Row]) -> Row:
    """Winners of earlier searches, measured again on another day and with other assemblers."""
    good = {name: row for name, row in kernels.items() if "ratio" in row.get("deployed", {})}
    versions = list(dict.fromkeys(v for row in good.values() for v in row["versions"]))
    return {
        "file": TRANSFER,
        "gpus": " and ".join(sorted({row["gpu"]["gpu"] for row in good.values()})),
        "versions": [f"ptxas {version}" for version in versions],
        "rows": [
            {
                **row,
                "kernel": name,
                "card": row["searched"]["gpu"].removeprefix("NVIDIA ").split()[0],
                "ratios": [row["versions"].get(v, {}).get("ratio") for v in versions],
            }
            for name, row in good.items()
        ],
    }


def _regressions() -> Row:
    """Kernels that a newer ptxas makes worse, by pair of versions and by what is lost."""
    found = load(REGRESSIONS)
    summary = found["summary"]
    recovered: dict[str, list[float]] = defaultdict(list)
    for row in found["rows"].values():
        search = (row.get("case") or {}).get("search") or {}
        for name, share in search.get("recovered", {}).items():
            recovered[name].append(share)
    return {
        **summary,
        "file": REGRESSIONS,
        "candidates": found["command"].partition("--candidates ")[2].split()[0],
        "older_asked": summary["older_offered"] + summary["older_refused"],
        "partly": summary["answers"].get("in part", 0),
        "pairs": [
            {"pair": pair, "other": other, "jumps": summary["jumps"][pair]}
            for pair, other in summary["other_code"].items()
        ],
        "kinds": [
            {"name": name, "kernels": number, "good": sum(s >= 0.9 for s in recovered[name])}
            for name, number in summary["losses"].items()
        ],
        "answers": {"recovered": 0, **summary["answers"]},
    }


def _regression_times() -> Row:
    """Time that kernels lose to a newer ptxas, and what the search recovers of it."""
    found = load(TIMES)
    rows = {name: row for name, row in found["rows"].items() if "screened" in row}
    ratios = [row["screened"]["ratio"] for row in rows.values()]
    searched = [(name, row) for name, row in rows.items() if "recovered" in row.get("measured", {})]
    compared = [
        {
            "kernel": name,
            "version": row["screened"]["older"],
            "causes": "; ".join(row["static"]["causes"][:2]),
            **row["measured"],
            "beside": (row["measured"].get("beside_older") or {}).get("ratio"),
        }
        for name, row in sorted(searched, key=lambda pair: -pair[1]["measured"]["older"]["ratio"])
    ]
    slower = [name for name, row in searched if (shown(row) or 0.0) >= SLOWER]
    cards = {row["measured"]["gpu"]["gpu"] for _, row in searched}
    return {
        **found["summary"],
        "file": TIMES,
        "gpus": " and ".join(sorted(cards)),
        "newest": found["newest"],
        "seconds_each": found["command"].partition("--seconds ")[2].split()[0],
        "least": min(ratios),
        "most": max(ratios),
        "faster": sum(ratio < 0.98 for ratio in ratios),
        "alike": sum(0.98 <= ratio < 1.02 for ratio in ratios),
        "longer": sum(ratio >= 1.02 for ratio in ratios),
        "rows": compared,
        "slower_kernels": len({name.split()[0] for name in slower}),
        "open": sum(lost(row) >= SLOWER and shown(row) is None for row in rows.values()),
    }


def _freedom() -> Row:
    """Free pairs of loop bodies, by kind of kernel."""
    found = load(FREEDOM)
    rows = {
        name: {**row, "shares": [row[pin] for pin in found["pins"]]}
        for name, row in found["summary"].items()
    }
    return {"file": FREEDOM, "pins": found["pins"], "rows": rows}


def _conversions() -> Row:
    """An exact change of conversions, measured on the kernels that have them."""
    found = load(CONVERSIONS)
    return {**found, "file": CONVERSIONS, "kernels": len(found["rows"])}


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Cycles that a warp waits per instruction, before and after the search."""
    names = sorted({*before, *after}, key=lambda n: -abs(after.get(n, 0) - before.get(n, 0)))
    return ", ".join(
        f"{name} {before.get(name, 0.0):.2f} to {after.get(name, 0.0):.2f}"
        for name in names[:_SHOWN_STALLS]
    )
