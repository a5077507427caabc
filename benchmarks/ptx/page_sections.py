"""Sections of the assembler's page: kernels that are new to the method, and dependent launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.markdown import table, wrapped
from benchmarks.ptx.dependent_launch_cell import FIGURES

Row = Mapping[str, Any]

_FIGURE_HEADS = {
    "order": "best order alone",
    "wait": "late wait, compiler's order",
    "best": "late wait, best order",
    "triton": "Triton's launch_pdl",
}


def order_gain(row: Row) -> float:
    """Deployed gain of the order alone, over the best of name, options and budgets."""
    over = row["over_b"]
    return float(over["ratio"]) if over is not None and over["verdict"] == "faster" else 1.0


def kernel_table(rows: Sequence[Row]) -> str:
    """A line for each record of the assembler suite."""
    lines = []
    for row in rows:
        over = row["over_a"]
        winner = row["search"].get("winner", {})
        interval = null = "–"
        if over is not None:
            interval = f"{over['low']:.3f} to {over['high']:.3f}"
            null = f"{over['null_low']:.4f} to {over['null_high']:.4f}"
        lines.append([
            row["kernel"], f"{row['original_us']:.2f}", f"{row['deployed']:.3f}", interval, null,
            f"{order_gain(row):.3f}", "; ".join(winner.get("levers", [])),
        ])  # fmt: skip
    head = ("kernel", "(a), us", "over (a)", "interval", "null", "over (b)", "candidate")
    return table(head, lines)


def unseen_section(rows: Sequence[Row], source: str) -> str:
    """Kernels that the method was not developed with; ``source`` links the result file."""
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in rows}))
    means = [geometric_mean([measure(row) for row in rows]) for measure in (_deployed, order_gain)]
    seconds = max(row["seconds_searched"] for row in rows)
    about = wrapped(
        f"{len(rows)} kernels as users write them ({gpus}, {seconds:.0f} s of search each). "
        "Baseline (a) is the fastest of up to six configurations of each kernel, or the PTX of "
        f"nvcc. Geometric mean over (a): {means[0]:.3f}, over (b): {means[1]:.3f}. "
        f"(`python -m benchmarks run ptx.assembler_suite --suite unseen`, {source})"
    )
    title = "## Kernels that the method was not developed with"
    return f"{title}\n\n{about}\n\n{kernel_table(rows)}"


def chains_section(rows: Sequence[Row], source: str) -> str:
    """Dependent launches in chains; ``source`` links the result file."""
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in rows}))
    noticed = sum(row["missing_wait"] == "wrong" for row in rows)
    about = wrapped(
        f"One kernel launched again and again on {gpus}: time of the compiler's cubin without "
        "dependent launch / time of the variant, in the same chain. The first column has no "
        "dependent launch; Triton's has its own wait as the first statement and launch_pdl. "
        "Figures of launches back to back are not comparable with the others of this page. Behind "
        "a kernel that writes an input late, the cubin without a wait gave other outputs in "
        f"{noticed} of {len(rows)} kernels, and no variant did. "
        f"(`python -m benchmarks run ptx.dependent_launch`, {source})"
    )
    lines = [
        [row["kernel"], f"{row['chain_us']:.2f}", *(_cell(row["figures"].get(f)) for f in FIGURES)]
        for row in rows
    ]
    full = [row["figures"] for row in rows if all(row["figures"].get(f) for f in FIGURES)]
    if full:
        means = [f"{geometric_mean([_kept(figures[f]) for figures in full]):.3f}" for f in FIGURES]
        lines.append([f"geometric mean of {len(full)} with all figures, kept", "", *means])
    head = ("kernel", "chain, us a launch", *(_FIGURE_HEADS[f] for f in FIGURES))
    return f"## Dependent launches\n\n{about}\n\n{table(head, lines)}"


def _deployed(row: Row) -> float:
    return float(row["deployed"])


def _kept(figure: Row) -> float:
    """The ratio, 1 where it is not a gain beyond the noise."""
    return float(figure["ratio"]) if figure["verdict"] == "faster" else 1.0


def _cell(figure: Row | None) -> str:
    """Ratio and interval; in brackets where it is no gain beyond the noise."""
    if not figure:
        return "–"
    text = f"{figure['ratio']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"
    return text if figure["verdict"] == "faster" else f"[{text}]"
