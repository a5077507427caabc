"""Section of the chains page: rows kept in shared memory, and what reuse of buffers saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.result_file import load, results
from benchmarks.harness.template import render

FILE = results("fusion") / "shared_memory_reuse.json"
NOT_MEASURED = "Their times are not measured."


def shared_memory_section() -> str:
    """Bytes of shared memory by kind of reuse, and the measured times of the fastest plans."""
    chains = load(FILE)["chains"]
    values = {"file": FILE, "buffers": _buffers(chains), "times": times(chains)}
    return render(__file__, values)


def _buffers(chains: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cubin of each chain that keeps most values, without and with reuse of its buffers."""
    return [
        {
            **way,
            "chain": name,
            "sizes": [way["reuse"][reuse]["shared"] or "too many" for reuse in _REUSES],
        }
        for name, chain in chains.items()
        if (way := next(filter(_keeps_most, chain["ways"]), None))
    ]


_REUSES = ("none", "dominance", "order")


def _keeps_most(variant: Mapping[str, Any]) -> bool:
    return variant["demoted"] == 0 and not variant["copied ahead"]


def times(chains: Mapping[str, Any]) -> str:
    """The fastest plans without and with kept rows, for chains that a GPU timed."""
    rows = [
        {
            **found,
            "chain": name,
            "without_us": found["median_us"][found["without"]],
            "shared_us": found["median_us"][found["shared"]],
        }
        for name, chain in chains.items()
        if (found := chain.get("measured"))
    ]
    return render(__file__, {"chains": rows}, "times") if rows else NOT_MEASURED
