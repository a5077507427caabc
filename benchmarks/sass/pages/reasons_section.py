"""Section of the results page: what the original kernels wait for (ncu), beside the gains.

A better order of instructions can hide fixed latencies. It can only start waits for memory, for a
barrier or for a full pipe earlier. Shares are of the warps' cycles in which they
do not issue (ncu's reason ``selected`` is left out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.schema import Record
from benchmarks.harness.template import render
from benchmarks.sass.pages.suite_section import deployed

GROUPS = {
    "fixed latency": ("wait", "dispatch_stall"),
    "global memory": ("long_scoreboard", "lg_throttle", "drain"),
    "shared memory, MUFU": ("short_scoreboard", "mio_throttle"),
    "barrier": ("barrier", "membar", "gmma"),
    "full pipe": ("math_pipe_throttle", "not_selected"),
}
"""ncu's stall reasons by group."""


def shares(waits: Mapping[str, float]) -> dict[str, float]:
    """Share of each group of reasons; "other" has the rest."""
    stalled = {reason: cycles for reason, cycles in waits.items() if reason != "selected"}
    total = sum(stalled.values())
    grouped = {
        group: sum(stalled.get(reason, 0.0) for reason in reasons) / total
        for group, reasons in GROUPS.items()
    }
    return {**grouped, "other": 1.0 - sum(grouped.values())}


def rows(kernels: Mapping[str, Any], gains: Mapping[str, float]) -> list[list[str]]:
    """One row for each kernel that was both profiled and tuned."""
    return [
        _row(kernel, counters, gains[kernel])
        for kernel, counters in kernels.items()
        if kernel in gains and counters.get("waits")
    ]


def _row(kernel: str, counters: Mapping[str, Any], gain: float) -> list[str]:
    parts = shares(counters["waits"])
    return [
        kernel,
        *(f"{100 * parts[group]:.0f} %" for group in GROUPS),
        f"{counters['issued_per_cycle']:.2f}",
        f"{counters['dram_percent']:.0f} %",
        f"{gain:.4f}",
    ]


def reasons_section(
    path: Path, record: Mapping[str, Any], records: Sequence[Record], strategy: str
) -> str:
    """Stall reasons of each original beside the gain of ``strategy``."""
    gains = deployed(records, strategy)
    cells = rows(record["kernels"], gains)
    by_reason: dict[bool, list[float]] = {True: [], False: []}
    for kernel, *_ in cells:
        parts = shares(record["kernels"][kernel]["waits"])
        is_latency = max(GROUPS, key=parts.__getitem__) == "fixed latency"
        by_reason[is_latency].append(gains[kernel])
    values = {
        "file": path,
        "strategy": strategy,
        "groups": list(GROUPS),
        "rows": cells,
        "latency_bound": by_reason[True],
        "others": by_reason[False],
    }
    return render(__file__, values)
