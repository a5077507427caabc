"""Write ``docs/results/learning.md``: learning strategies compared with annealing.

python -m benchmarks page learning
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import read
from benchmarks.harness.template import render, render_page, source
from benchmarks.learning import measured
from benchmarks.learning.figure import COLOURS, figure
from benchmarks.learning.summary import PARTS, summary
from nostall.core.files.atomic import write_atomically

RESULT = results("learning") / "strategies.json"
STEPS = results("learning") / "steps_per_second.json"
PAGE = PAGES / "learning.md"
FIGURE = PAGES / "learning_curves.svg"
TARGET = 3.0
"""Factor by which training on other kernels should reduce evaluations."""

Rows = Sequence[Mapping[str, Any]]


def text() -> str:
    """The whole page."""
    result, steps = load(RESULT), source(STEPS)
    # The file has one record for each kind of observation.
    speeds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for item in steps["records"]:
        speeds.setdefault(item["kernel"], {})[item["observation"]] = item
    values = {
        "compared": compared(result, summary(result["records"])),
        "measured": measured.measured(read(measured.RESULT).records),
        "steps": steps,
        "speeds": speeds,
    }
    return render_page(__file__, PAGE, values)


def write() -> None:
    """Write the page and its figure."""
    result = load(RESULT)
    write_atomically(PAGE, text().encode())
    write_atomically(FIGURE, figure(summary(result["records"]), result["evaluations"]).encode())


def compared(result: Mapping[str, Any], rows: Rows) -> str:
    """Modelled comparison: gains, evaluations to parts of the best gain, savings by training."""
    evaluations = result["evaluations"]
    strategies, kernels = _strategies(rows), list(dict.fromkeys(row["kernel"] for row in rows))
    factors = [saved(rows, part, evaluations) for part in PARTS]
    values = {
        **result,
        "seeds": max(row["seeds"] for row in rows),
        "file": RESULT,
        "strategies": [f"`{strategy}`" for strategy in strategies],
        "gains": [_gains(rows, kernel, strategies) for kernel in kernels],
        "processor_s": [
            f"{median(r['processor_s'] for r in rows if r['strategy'] == strategy):.0f} s"
            for strategy in strategies
        ],
        "figure": FIGURE.name,
        "parts": [f"{100 * part:.0f}" for part in PARTS],
        "needed": [_needed(rows, kernel, strategies) for kernel in kernels],
        "target": TARGET,
        "answers": "; ".join(
            _answer(part, found, kernels) for part, found in zip(PARTS, factors, strict=True)
        ),
        "percents": [f"{100 * part:.0f} %" for part in PARTS],
        "savings": [
            {"kernel": kernel, "factors": [found.get(kernel) for found in factors]}
            for kernel in kernels
        ],
    }
    return render(__file__, values, "compared")


def _strategies(rows: Rows) -> list[str]:
    return [s for s in COLOURS if any(row["strategy"] == s for row in rows)]


def _row(rows: Rows, kernel: str, strategy: str) -> Mapping[str, Any] | None:
    return next((r for r in rows if (r["kernel"], r["strategy"]) == (kernel, strategy)), None)


def _gains(rows: Rows, kernel: str, strategies: Sequence[str]) -> list[str]:
    """Final gains on a kernel; the best of the strategies with all seeds is bold."""
    runs = [_row(rows, kernel, strategy) for strategy in strategies]
    seeds = max(r["seeds"] for r in rows)
    best = max((r["median_ratio"] for r in runs if r and r["seeds"] == seeds), default=inf)
    return [kernel, *(_gain(r, best, seeds) if r else "–" for r in runs)]


def _gain(row: Mapping[str, Any], best: float, seeds: int) -> str:
    middle, low, high = (100 * (row[key] - 1) for key in ("median_ratio", "low", "high"))
    gain = f"{middle:.2f}"
    gain = f"**{gain}**" if row["median_ratio"] == best else gain
    fewer = "" if row["seeds"] == seeds else f", seeds: {row['seeds']}"
    return f"{gain} ({low:.2f}–{high:.2f}{fewer})"


def _needed(rows: Rows, kernel: str, strategies: Sequence[str]) -> list[str]:
    """Evaluations to parts of the best gain on a kernel."""
    runs = [_row(rows, kernel, strategy) for strategy in strategies]
    best = next(r["best_known"] for r in runs if r)
    cells = [" / ".join(_number(_middle(r, p)) for p in PARTS) if r else "–" for r in runs]
    return [f"{kernel}, {100 * (best - 1):.2f} %", *cells]


def _middle(row: Mapping[str, Any], part: float) -> float:
    """Median over seeds of the evaluations needed; infinite if most runs never reach the part."""
    return median(inf if n is None else n for n in row["evaluations_to"][str(part)])


def _number(evaluations: float) -> str:
    return "–" if evaluations == inf else f"{evaluations:,.0f}"


def saved(rows: Rows, part: float, evaluations: int) -> dict[str, float]:
    """Evaluations of ``ppo`` divided by those of ``ppo-trained`` to a part of the gain, by kernel.

    A strategy that never reaches the part counts with all its evaluations. Kernels on which neither
    reaches it are left out.
    """
    factors = {}
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        pair = [_row(rows, kernel, strategy) for strategy in ("ppo", "ppo-trained")]
        if all(pair):
            untrained, trained = (_middle(row, part) for row in pair if row)
            if min(untrained, trained) < inf:
                factors[kernel] = min(untrained, evaluations) / min(trained, evaluations)
    return factors


def _answer(part: float, factors: Mapping[str, float], kernels: Sequence[str]) -> str:
    """Whether training saves as many evaluations as it should, to a part of the best gain."""
    mean = geometric_mean(factors.get(kernel, 1.0) for kernel in kernels)
    enough = [kernel for kernel, factor in factors.items() if factor >= TARGET]
    return (
        f"to {100 * part:.0f} % of the best known **{'yes' if mean >= TARGET else 'no'}**, "
        f"{mean:.1f} times fewer in the geometric mean, {TARGET:.0f} times or more on "
        f"{len(enough)} of {len(kernels)} kernels" + (f" ({', '.join(enough)})" if enough else "")
    )
