"""Write the tables of docs/modelled.md and of the README that need no GPU, from committed files.

    python -m benchmarks page sass-modelled

A test holds both pages to the files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.generated_regions import README, region, table
from benchmarks.harness.result_file import ROOT, load, results
from nostall.core.files import write_atomically

PAGE = ROOT.parent / "docs" / "modelled.md"
_STRATEGIES = ("anneal", "sip", "random")


def page(text: str) -> str:
    """docs/modelled.md with what the files say."""
    text = region(text, "search", search(_file("search")["records"]))
    static = _file("sass_static")
    text = region(text, "speed", speed(static["kernels"]))
    return region(text, "growth", growth(static["grown"], static["growth"]))


def readme(text: str) -> str:
    """The README with the share of instructions that can move."""
    return region(text, "mobility", mobility(_file("mobility")["records"]))


def search(records: Sequence[Mapping[str, Any]]) -> str:
    """Original / best by kernel and strategy, mean and its standard error over the seeds."""
    rows = []
    for kernel in dict.fromkeys(r["kernel"] for r in records):
        mine = [r for r in records if r["kernel"] == kernel]
        found = ([r["ratio"] for r in mine if r["strategy"] == s] for s in _STRATEGIES)
        rows.append((kernel, *map(_mean, found)))
    seeds = len({r["seed"] for r in records})
    head = (f"kernel, {seeds} seeds", *(f"`{s}`" for s in _STRATEGIES))
    return table(head, rows)


def speed(kernels: Iterable[Mapping[str, Any]]) -> str:
    """Seconds and rates by kernel, medians."""
    rows = []
    for kernel in kernels:
        found = kernel["median"]
        times = (found[name] for name in ("parse_s", "space_s", "parse_and_analyse_s", "verify_s"))
        rates = (found[name] for name in ("proposals_per_s", "model_per_s"))
        cells = [f"{value:.2f} s" for value in times] + [f"{value:,.0f}" for value in rates]
        rows.append((kernel["kernel"], f"{kernel['instructions']:,}", *cells))
    head = ("kernel", "instructions", "parse", "space", "both", "full verify", "proposals/s")
    return table((*head, "model evaluations/s"), rows)


def growth(kernels: Sequence[Mapping[str, Any]], against: Mapping[str, Any]) -> str:
    """Seconds of one kernel in several sizes, and how each step compares with n log n."""
    rows = []
    for at, kernel in enumerate(kernels):
        found = kernel["median"]
        cells = [f"{kernel['instructions']:,}"]
        for name in ("parse_and_analyse_s", "verify_s"):
            step = f"{against[name][at - 1]['against_n_log_n']:.2f}" if at else ""
            cells += [f"{found[name]:.2f} s", step]
        rows.append(cells)
    head = ("instructions", "parse and space", "against n log n", "full verify", "against n log n")
    return table(head, rows)


def mobility(records: Iterable[Mapping[str, Any]], arch: str = "sm_90") -> str:
    """Instructions with at least one legal slide."""
    mine = [r for r in records if r["arch"] == arch]
    rows = [(r["kernel"], str(r["instructions"]), f"{r['share']:.1%}") for r in mine]
    return table(("kernel", "instructions", "movable"), rows)


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{mean(values):.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"


def _file(name: str) -> Any:
    return load(results("sass") / f"{name}.json")


def main() -> int:
    write_atomically(PAGE, page(PAGE.read_text()).encode())
    write_atomically(README, readme(README.read_text()).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
