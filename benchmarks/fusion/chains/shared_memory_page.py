"""Write the tables of docs/fusion_codegen.md on rows in shared memory from the committed file.

    python -m benchmarks page fusion-chains

A test holds the page to the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import region, table
from benchmarks.harness.result_file import ROOT, load, results
from nostall.core.files import write_atomically

PAGE = ROOT.parent / "docs" / "fusion_codegen.md"
FILE = results("fusion") / "shared_memory_reuse.json"
NOT_MEASURED = "Their times have not been measured yet."


def page(text: str) -> str:
    """docs/fusion_codegen.md with what the file says."""
    chains = load(FILE)["chains"]
    text = region(text, "buffers", kept(chains))
    return region(text, "buffer times", times(chains))


def kept(chains: Mapping[str, Any]) -> str:
    """Bytes of the cubins of what keeps most, and blocks of an SM without and with reuse."""
    head = ["chain", "buffers", "live at once", "no reuse", "by dominance", "by order", "blocks"]
    rows = []
    for name, found in chains.items():
        most = next((way for way in found["ways"] if _keeps_most(way)), None)
        if most is None:
            continue
        cubins = most["reuse"]
        told = [
            f"{cubins[reuse]['shared']:,}" if cubins[reuse]["shared"] else "too many"
            for reuse in ("none", "dominance", "order")
        ]
        blocks = f"{cubins['none']['blocks_per_sm']} → {cubins['order']['blocks_per_sm']}"
        rows.append([name, str(len(most["buffers"])), f"{most['live at once']:,}", *told, blocks])
    return table(head, rows)


def _keeps_most(way: Mapping[str, Any]) -> bool:
    return way["demoted"] == 0 and not way["copied ahead"]


def times(chains: Mapping[str, Any]) -> str:
    """The fastest plans with and without kept rows, where a GPU timed them."""
    measured = {name: c["measured"] for name, c in chains.items() if "measured" in c}
    if not measured:
        return NOT_MEASURED
    head = ["chain", "fastest without", "us", "that keeps rows", "us", "ratio", "interval"]
    rows = []
    for name, found in measured.items():
        low, high = found["interval"]
        plain, mine = found["without"], found["shared"]
        cells = [name, plain, f"{found['median_us'][plain]:.1f}"]
        cells += [mine, f"{found['median_us'][mine]:.1f}", f"{found['ratio']:.3f}"]
        rows.append([*cells, f"{low:.3f} to {high:.3f}"])
    return table(head, rows)


def main() -> None:
    write_atomically(PAGE, page(PAGE.read_text()).encode())


if __name__ == "__main__":
    main()
