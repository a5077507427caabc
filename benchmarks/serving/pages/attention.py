"""Sections of ``docs/results/serving.md`` on attention: times, checks and the tables' builders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import nan
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render, source

FOLDER = results("serving")
ATTENTION = FOLDER / "attention.json.gz"
CHECK = FOLDER / "kernel_check.json"
BUILD = FOLDER / "table_build.json.gz"
FLASHINFER = FOLDER / "attention_flashinfer.json.gz"
"""An earlier run with FlashInfer, before the tile of the reduction was chosen."""

Row = Mapping[str, Any]
PEERS = ("FA3", "vLLM Triton", "SDPA", "paper", "stages", "streams")
"""Kernels beside ours, by their names in the result file."""
GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("verify", lambda kind: kind == "verify"),
    ("decode", lambda kind: kind == "decode"),
    ("prefill", lambda kind: kind == "prefill"),
    ("prefill and decode", lambda kind: kind == "mixed"),
    ("all", lambda kind: True),
)
"""Groups of batches, by kind."""
RULES = {"prefill": "tall"}
"""Name of the rule's plan among the candidates, where it is not ``rule``."""
PLANS = {"stages": "ours"}
"""Plan that a peer is compared with: stages are those of the fastest plan, all others the rule."""
BANDWIDTH = 4.8e12
"""Bytes/s of the H200's memory, nominal."""
BARS = (
    ("verify", "FA3", 1.20), ("decode", "FA3", 1.00), ("prefill and decode", "FA3", 1.20),
    ("prefill", "FA3", 0.85), ("all", "vLLM Triton", 1.50),
)  # fmt: skip
"""Requirements: least geometric mean of a peer's time over meta-attention's."""


def batch_times(row: Row) -> dict[str, float]:
    """Median time of each kernel on a batch, in us; ``rule`` is the plan of the fixed rules.

    ``streams`` is the fastest of the ways to run prefills beside all others.
    """
    times: dict[str, float] = {}
    rule = RULES.get(row.get("plan_kind", ""), "rule")
    for entry in row["entries"]:
        medians = {name: median(samples) for name, samples in entry["samples_us"].items()}
        if entry["final"]:
            times |= medians
        elif rule in medians:
            times["rule"] = medians[rule]
    beside = [time for name, time in times.items() if name == "streams" or name.startswith("tall ")]
    if beside:
        times["streams"] = min(beside)
    return times


def grouped(rows: Iterable[Row]) -> dict[str, list[dict[str, float]]]:
    """Times of the batches of each group."""
    kept = list(rows)
    return {
        title: [batch_times(row) for row in kept if belongs(row["kind"])]
        for title, belongs in GROUPS
    }


def ratio(group: Iterable[Mapping[str, float]], name: str) -> float | None:
    """Geometric mean of a peer's time over the rule's; None if no batch has both."""
    ours = PLANS.get(name, "rule")
    ratios = [times[name] / times[ours] for times in group if name in times and ours in times]
    return geometric_mean(ratios) if ratios else None


def best_flops(rows: Iterable[Row]) -> float:
    """The most FLOP/s of any kernel on any batch."""
    return max(
        row["bound"]["flops"] / (time * 1e-6) for row in rows for time in batch_times(row).values()
    )


def bound_us(row: Row, flops: float) -> float:
    """The longer of a batch's bytes at the memory's nominal rate and its FLOPs at a rate."""
    bound = row["bound"]
    return 1e6 * max(bound["bytes"] / BANDWIDTH, bound["flops"] / flops)


def attention() -> str:
    """Times of all kernels on all batches."""
    rows = load(ATTENTION)["results"]
    flops = best_flops(rows)
    values = {
        "gpus": " and ".join(sorted({row["gpu"] for row in rows})),
        "best_tflop_s": flops / 1e12,
        "attention_file": ATTENTION,
        "sweep_file": FOLDER / "attention_sweep_h200.json.gz",
        "variants_file": FOLDER / "tall_variants_h200.json.gz",
        "batches": [_batch(row, flops) for row in rows],
        "groups": [
            {"title": title, "number": len(group), "ratios": [ratio(group, p) for p in PEERS]}
            for title, group in grouped(rows).items()
            if group
        ],
        "bars": list(_bars(rows)),
        # Paragraphs of 100 columns, then marked as items.
        "missed": "\n\n".join(
            "- " + reason.replace("\n", "\n  ")
            for reason in render(__file__, _missed(rows), "missed").split("\n\n")
        ),
        "flashinfer": _flashinfer(load(FLASHINFER)["results"]),
        "flashinfer_file": FLASHINFER,
        "constants_file": FOLDER / "constants_h200.json",
    }
    return render(__file__, values)


def _batch(row: Row, flops: float) -> Row:
    """Times of a batch beside its bound."""
    times, bound = batch_times(row), bound_us(row, flops)
    return {
        **times,
        "heads": "/".join(map(str, row["heads"])),
        "batch": row["batch"],
        "bound_us": bound,
        "over_bound": times["rule"] / bound,
        "peers": [times.get(name) for name in PEERS],
    }


def _bars(rows: Sequence[Row]) -> Iterator[Row]:
    """The requirements, and whether they are met."""
    groups = grouped(rows)
    for title, peer, least in BARS:
        if (found := ratio(groups[title], peer)) is not None:
            yield _bar(f"{title}: {peer} / ours", f"≥ {least:.2f}", f"{found:.2f}", found >= least)
    over = _over_bound(rows, "decode", "rule")
    yield _bar("decode: ours / bound", "≤ 1.15", f"{over:.2f}", over <= 1.15)
    stages = 1 / (ratio(groups["prefill and decode"], "stages") or nan)
    name = "prefill and decode: fastest plan / stages"
    yield _bar(name, "≤ 0.85", f"{stages:.2f}", stages <= 0.85)
    slower = sum(
        times["vLLM Triton"] < times["rule"] for times in groups["all"] if "vLLM Triton" in times
    )
    yield _bar("batches slower than vLLM's Triton", "0", str(slower), slower == 0)


def _bar(name: str, limit: str, found: str, is_met: bool) -> Row:
    return {"name": name, "limit": limit, "found": found, "met": is_met}


def _over_bound(rows: Iterable[Row], kind: str, name: str) -> float:
    """Geometric mean of a kernel's time over the bound, on the batches of one kind."""
    kept = list(rows)
    flops = best_flops(kept)
    return geometric_mean(
        batch_times(row)[name] / bound_us(row, flops) for row in kept if row["kind"] == kind
    )


def _missed(rows: Sequence[Row]) -> Row:
    """Figures of the text that says why limits are missed."""
    flops = best_flops(rows)
    extra = [
        batch_times(row)["rule"] - bound_us(row, flops) for row in rows if row["kind"] == "decode"
    ]
    return {
        "verifies": {name: _over_bound(rows, "verify", name) for name in ("rule", "FA3")},
        "extra": extra,
        "streams": ratio(grouped(rows)["prefill and decode"], "streams") or nan,
    }


def _flashinfer(rows: Sequence[Row]) -> list[str]:
    return [
        f"{title} {value:.2f} ({len(group)} batches)"
        for title, group in grouped(rows).items()
        if (value := ratio(group, "FlashInfer")) is not None
    ]


def checks() -> str:
    """Correctness of the kernels, and memcheck."""
    content = source(CHECK)
    rows = [
        {**row, "errors": row["memory_errors"] if row["memcheck"] else None}
        for row in content["results"]
    ]
    return render(__file__, {**content, "results": rows}, "checks")


def builders() -> str:
    """Times of the builders of the tables."""
    content = source(BUILD)
    # Which builds of 256 sequences and more miss the limits.
    large = [r for r in content["results"] if r["sequences"] >= 256 and r["order"] != "lpt"]
    slow = [
        f"{row['batch']} {row['order']} ({row['device']['p50_us']:.1f} us)"
        for row in large
        if row["device"] and row["device"]["p50_us"] >= 10
    ]
    values = {
        "large": len(large),
        "late": sum(row["host"]["p99_us"] >= 50 for row in large),
        "medians_us": [row["host"]["p50_us"] for row in large],
        "slow": slow or None,
    }
    return render(__file__, {**content, **values}, "builders")
