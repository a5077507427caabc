"""Figures of ``docs/explanation/serving.md``: variants of the kernel of tall tiles."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean, median

from benchmarks.harness.result_file import load, results

TALL = results("serving") / "tall_variants_h200.json.gz"
Times = Mapping[str, Mapping[str, float]]
"""Batch -> method -> median time in microseconds."""


def figures() -> dict[str, str]:
    """Name -> text."""
    joint, apart = (_medians(run["times"]) for run in load(TALL)["runs"])
    eight_warps = [_over_fa3(joint, name) for name in _methods(joint) if name.startswith("n")]
    serial = _over_fa3(joint, "n128s2-serial")
    eight_warps.remove(serial)
    forced = [_over_fa3(apart, name) for name in ("queue", "queue-s3", "lpt", "lpt-free")]
    shipped = [row["lpt-free-nopin"] / row["rule"] for row in apart.values() if "queue" in row]
    decode = apart["decode-128k (28, 4)"]
    turns = _over_fa3(apart, "lpt") / _over_fa3(apart, "lpt-free")
    return {
        "tall-rule": f"{_over_fa3(apart, 'rule'):.2f}",
        "tall-eight-warps": f"{min(eight_warps):.2f} to {max(eight_warps):.2f}",
        "tall-serial": f"{serial:.2f}",
        "tall-forced": f"{min(forced):.2f} to {max(forced):.2f}",
        "tall-shipped": f"{_over_fa3(apart, 'lpt-free-nopin'):.2f}",
        "tall-turns": f"{100 * abs(turns - 1):.0f} %",
        "tall-over-rule": f"{min(shipped):.2f} to {max(shipped):.2f}",
        "reduction-old": f"{decode['rule, old reduction']:.0f} us",
        "reduction-new": f"{decode['rule']:.0f} us",
        "decodes": f"{1 / _over_fa3(apart, 'n64s3 w4x2 u2', kind='decode'):.2f}",
    }


def _medians(times: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Times:
    return {
        batch: {name: median(samples) for name, samples in row["samples_us"].items()}
        for batch, row in times.items()
    }


def _methods(times: Times) -> set[str]:
    return {name for row in times.values() for name in row}


def _over_fa3(times: Times, method: str, kind: str = "prefill") -> float:
    """Geometric mean of FlashAttention-3's time over a method's, on the batches of one kind."""
    words = ("prefill", "reuse") if kind == "prefill" else ("decode", "mixed", "trace")
    return geometric_mean(
        row["FA3"] / row[method]
        for batch, row in times.items()
        if batch.startswith(words) and method in row
    )
