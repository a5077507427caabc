"""Where the suite's kernels wait, beside what was gained: a section of docs/results.md.

What an ordering of instructions can hide is the wait for results of fixed latency; what comes from
memory, from a barrier or through a full pipe it can only begin earlier.  Shares are of the warps'
cycles that are not issuing (ncu's ``selected`` is left out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import Record

FILE = results("sass") / "stall_reasons.json"
GROUPS = {
    "fixed latency": ("wait", "dispatch_stall"),
    "global memory": ("long_scoreboard", "lg_throttle", "drain"),
    "shared memory, MUFU": ("short_scoreboard", "mio_throttle"),
    "barrier": ("barrier", "membar", "gmma"),
    "full pipe": ("math_pipe_throttle", "not_selected"),
}
_COLUMNS = ("kernel", *GROUPS, "issued per cycle", "DRAM", "deployed")


def shares(waits: Mapping[str, float]) -> dict[str, float]:
    """The part of each group of reasons; "other" has the rest."""
    stalled = {reason: cycles for reason, cycles in waits.items() if reason != "selected"}
    whole = sum(stalled.values())
    found = {
        group: sum(stalled.get(reason, 0.0) for reason in reasons) / whole
        for group, reasons in GROUPS.items()
    }
    return {**found, "other": 1.0 - sum(found.values())}


def rows(kernels: Mapping[str, Any], gained: Mapping[str, float]) -> list[list[str]]:
    """One row per kernel that was both counted and tuned."""
    found = []
    for kernel, counted in kernels.items():
        if kernel not in gained or not counted.get("waits"):
            continue
        parts = shares(counted["waits"])
        numbers = [f"{100 * parts[group]:.0f} %" for group in GROUPS]
        dram = f"{counted['dram_percent']:.0f} %"
        found.append(
            [kernel, *numbers, f"{counted['issued_per_cycle']:.2f}", dram, f"{gained[kernel]:.4f}"]
        )
    return found


def gains(records: Sequence[Record], strategy: str) -> dict[str, float]:
    """What ``strategy`` deploys for each kernel, median over seeds."""
    names = {r.kernel for r in records if r.strategy == strategy}
    return {
        name: median(
            r.deployed_ratio for r in records if (r.kernel, r.strategy) == (name, strategy)
        )
        for name in names
    }


def reasons_section(records: Sequence[Record], strategy: str) -> list[str]:
    """The lines of the section; none before ncu has counted anything."""
    if not FILE.exists():
        return []
    counted = load(FILE)
    gained = gains(records, strategy)
    table = rows(counted["kernels"], gained)
    if not table:
        return []
    first, others = [], []
    for kernel in (row[0] for row in table):
        parts = shares(counted["kernels"][kernel]["waits"])
        most = max(GROUPS, key=parts.__getitem__)
        (first if most == "fixed latency" else others).append(gained[kernel])
    return [
        "",
        f"Where the originals wait: ncu's stall reasons (`{counted['command']}`,",
        f"[JSON](../benchmarks/results/{FILE.name})) of {len(table)} of the kernels, one launch "
        f"each, beside what `{strategy}` deploys. Where the largest part is the fixed latency of "
        f"arithmetic, the median is {median(first):.4f} ({len(first)} kernels); where it is "
        "memory, barriers or full pipes, which the order of instructions hardly changes, it is "
        f"{median(others):.4f} ({len(others)} kernels).",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(row) + " |" for row in table),
    ]
