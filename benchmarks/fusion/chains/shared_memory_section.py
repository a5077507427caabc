"""Section of the chains page: rows kept in shared memory, and what reuse of buffers saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FILE = results("fusion") / "shared_memory_reuse.json"
NOT_MEASURED = "Their times are not measured."


def shared_memory_section() -> str:
    """Bytes of shared memory by kind of reuse, and the measured times of the fastest plans."""
    chains = load(FILE)["chains"]
    intro = wrapped(
        "Kernels that keep wide rows in shared memory need buffers that are not live at the same "
        "time; those can share memory. The table has the bytes of shared memory of the cubin for "
        "sm_90 without reuse, with reuse by dominance (as in FusionStitching), and with reuse by "
        "the order of the kernel's passes (nostall's default), and the blocks of an SM, *modelled* "
        f"from bytes and registers (`python -m benchmarks run fusion.shared_memory_reuse`, "
        f"{link(FILE)})."
    )
    timed = "The fastest plan without and with kept rows, *measured*:"
    return "\n\n".join(
        ["## Rows in shared memory", intro, buffer_bytes(chains), timed, times(chains)]
    )


def buffer_bytes(chains: Mapping[str, Any]) -> str:
    """Bytes of the cubin that keeps most values, and blocks of an SM without and with reuse."""
    head = ["chain", "buffers", "live at once", "no reuse", "by dominance", "by order", "blocks"]
    rows = []
    for name, chain in chains.items():
        variant = next((way for way in chain["ways"] if _keeps_most(way)), None)
        if variant is None:
            continue
        cubins = variant["reuse"]
        sizes = [
            f"{cubins[reuse]['shared']:,}" if cubins[reuse]["shared"] else "too many"
            for reuse in ("none", "dominance", "order")
        ]
        blocks = f"{cubins['none']['blocks_per_sm']} → {cubins['order']['blocks_per_sm']}"
        live = f"{variant['live at once']:,}"
        rows.append([name, str(len(variant["buffers"])), live, *sizes, blocks])
    return table(head, rows)


def _keeps_most(variant: Mapping[str, Any]) -> bool:
    return variant["demoted"] == 0 and not variant["copied ahead"]


def times(chains: Mapping[str, Any]) -> str:
    """The fastest plans without and with kept rows, for chains that a GPU timed."""
    measured = {name: c["measured"] for name, c in chains.items() if "measured" in c}
    if not measured:
        return NOT_MEASURED
    head = ["chain", "fastest without", "us", "that keeps rows", "us", "ratio", "interval"]
    rows = []
    for name, result in measured.items():
        low, high = result["interval"]
        without, keeping = result["without"], result["shared"]
        cells = [name, without, f"{result['median_us'][without]:.1f}"]
        cells += [keeping, f"{result['median_us'][keeping]:.1f}", f"{result['ratio']:.3f}"]
        rows.append([*cells, f"{low:.3f} to {high:.3f}"])
    return table(head, rows)
