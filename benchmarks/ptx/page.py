"""Write ``docs/results/assembler.md``: what a search of the input of ptxas gains on a GPU.

python -m benchmarks page assembler
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.ptx.page_sections import (
    chains_section,
    kernel_table,
    order_gain,
    unseen_section,
)
from nostall.core.files import write_atomically

PAGE = PAGES / "assembler.md"
SUITE = results("ptx") / "assembler_suite.json"
VALIDATOR = results("ptx") / "validator.json"
UNSEEN = results("ptx") / "unseen_suite.json"
CHAINS = results("ptx") / "dependent_launch.json"
SECTIONS: Mapping[Path, Callable[[Sequence[Mapping[str, Any]], str], str]] = {
    UNSEEN: unseen_section,
    CHAINS: chains_section,
}
"""Result file -> the section that shows it, once it is committed."""
_MISSING = {
    UNSEEN: "kernels that the method was not developed with",
    CHAINS: "dependent launch",
}
FILLING = frozenset(("softmax-4096x8192", "rmsnorm-4096x8192"))
"""Kernels of the suite at shapes that fill the GPU; the others have the published small shapes."""
_DROPPED = {
    "wrong": "gave other outputs",
    "fault": "faulted",
    "hang": "did not end",
    "hazards": "had hazards in their machine code",
    "unproved": "had PTX that the validator could not prove",
    "serialized": "got a message of ptxas about lost asynchronous execution",
    "error": "were rejected by ptxas",
}
"""Counted result -> why such candidates were dropped."""

Row = Mapping[str, Any]

GROUPS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("published small shapes", lambda r: r["kernel"] not in FILLING),
    ("their mma kernels", lambda r: r["kernel"].endswith("@mma")),
    ("their wgmma kernels", lambda r: r["kernel"].endswith("@wgmma")),
    ("shapes that fill the GPU", lambda r: r["kernel"] in FILLING),
)
"""Groups of kernels of the summary."""


def text() -> str:
    """The whole page."""
    content = load(SUITE)
    rows = [row for row in content["records"] if row["method"] == "assembler"]
    return page(
        "The assembler's input, measured",
        "python -m benchmarks page assembler",
        [
            _introduction(content, rows),
            _summary(rows),
            f"## Kernels\n\n{kernel_table(rows)}",
            *_more_sections(),
            _candidates(rows),
            _open(),
        ],
    )


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def _introduction(content: Mapping[str, Any], rows: Sequence[Row]) -> str:
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in rows}))
    drivers = " and ".join(sorted({row["gpu"]["driver_version"] for row in rows}))
    seconds = sorted({row["seconds_searched"] for row in rows})
    return wrapped(
        f"[`--strategy assembler`](../explanation/search.md#the-assemblers-input) on {gpus} "
        f"(driver {drivers}, Triton {content['versions']['triton']}), {seconds[0]:.0f} to "
        f"{seconds[-1]:.0f} s of search for each kernel, one seed. Baseline (a) is the fastest of "
        "24 to 30 configurations of the compiler, timed anew in the same call. Baseline (b) is "
        "the fastest of other kernel names, register budgets, options and versions of ptxas with "
        "the compiler's order, so a gain over (b) is that of the order alone. A fresh process "
        "compares the result with each baseline; where the interval or the null does not show a "
        "gain, the deployed ratio is 1. "
        f"(`python -m benchmarks run ptx.assembler_suite`, {link(SUITE)})"
    )


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for title, belongs in GROUPS:
        group = [row for row in rows if belongs(row)]
        over_a = [row["deployed"] for row in group]
        over_b = [order_gain(row) for row in group]
        lines.append([
            title, str(len(group)), f"{geometric_mean(over_a):.3f}", f"{max(over_a):.3f}",
            f"{geometric_mean(over_b):.3f}", f"{max(over_b):.3f}",
        ])  # fmt: skip
    head = ("kernels", "number", "over (a)", "best", "over (b)", "best")
    note = wrapped("Geometric means of deployed ratios.")
    return f"## Summary\n\n{table(head, lines)}\n\n{note}"


def _candidates(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    dropped = ", ".join(f"{counts[name]:,} {why}" for name, why in _DROPPED.items())
    idle = [row["search"]["idle_share"] for row in rows]
    validator = load(VALIDATOR)
    return "## Candidates\n\n" + wrapped(
        f"{counts['timed']:,} candidates were timed. Of the others, {dropped}. The GPU measured "
        f"nothing in {min(idle):.0%} to {max(idle):.0%} of a search, with "
        f"{max(row['search']['workers'] for row in rows)} processes that build candidates. "
        f"Without a GPU, the PTX validator judged {validator['violations_checked']:,} seeded "
        f"violations, {validator['orders']['checked']:,} random orders and "
        f"{validator['legal_checked']:,} other legal changes; {validator['failed']} answers were "
        f"wrong (`python -m benchmarks run ptx.validator`, {link(VALIDATOR)})."
    )


def _more_sections() -> list[str]:
    """Sections whose result files are committed."""
    return [
        make([r for r in load(file)["records"] if r.get("method", "assembler") == "assembler"],
             link(file))
        for file, make in SECTIONS.items() if file.exists()
    ]  # fmt: skip


def _open() -> str:
    missing = [what for file, what in _MISSING.items() if not file.exists()]
    return "## Not measured yet\n\n" + wrapped(
        "Further seeds, searches of ten minutes, matrix products at shapes that fill the GPU, "
        + ", ".join([*missing, "and another card."])
    )
