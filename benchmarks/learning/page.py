"""Write the comparisons in docs/learning.md, modelled and measured, and the figure.

python -m benchmarks page learning

From benchmarks/learning/results/strategies.json, and from gpu_game.json where it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import inf
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import region, table, wrapped
from benchmarks.harness.result_file import ROOT, load, results
from benchmarks.harness.schema import Record, read
from benchmarks.learning import measured
from benchmarks.learning.figure import COLOURS, figure
from benchmarks.learning.summary import PARTS, summary
from nostall.core.files import write_atomically

RESULT = results("learning") / "strategies.json"
PAGE = ROOT.parent / "docs" / "learning.md"
FIGURE = PAGE.with_name("learning_curves.svg")
WANTED = 3.0
"""How many times fewer evaluations training on other kernels was to need."""

Rows = Sequence[Mapping[str, Any]]


def page(text: str, result: Mapping[str, Any], gpu: Sequence[Record] = ()) -> str:
    """docs/learning.md with what the results say."""
    text = region(text, "compared", compared(result, summary(result["records"])))
    return region(text, "measured", measured.measured(gpu)) if gpu else text


def gpu_records() -> tuple[Record, ...]:
    """What a GPU said, if it was asked."""
    return read(measured.RESULT).records if measured.RESULT.exists() else ()


def compared(result: Mapping[str, Any], rows: Rows) -> str:
    """How it was made, final gains, evaluations to parts of the best known, what training saves."""
    parts = [wrapped(_origin(result, rows)), _gains(rows)]
    parts.append(f"![learning curves]({FIGURE.name})")
    parts += [wrapped(_needed_head()), _needed(rows)]
    parts += [wrapped(_answer(rows, result["evaluations"])), _savings(rows, result["evaluations"])]
    return "\n\n".join(parts)


def _origin(result: Mapping[str, Any], rows: Rows) -> str:
    seeds = max(row["seeds"] for row in rows)
    return (
        f"All *modelled*, {result['arch']}: {result['evaluations']:,} evaluations of each of "
        f"{seeds} seeds, made by `{result['command']}` on {result['processor']}, one thread "
        f"({result['date'][:10]}, [JSON](../benchmarks/results/{RESULT.name}) with every curve). "
        f"`ppo-trained` begins with a policy from {result['rollouts']} rollouts of each kernel of "
        "the other half (kernels by name, every second); those turns are not in its evaluations. "
        "`sip` needs floating-point work and is restarted when its published run ends. Final gain "
        "in per cent, median over seeds, with the lowest and highest; processor seconds of one "
        "run, median over kernels:"
    )


def _strategies(rows: Rows) -> list[str]:
    return [s for s in COLOURS if any(row["strategy"] == s for row in rows)]


def _kernels(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["kernel"] for row in rows))


def _row(rows: Rows, kernel: str, strategy: str) -> Mapping[str, Any] | None:
    return next((r for r in rows if (r["kernel"], r["strategy"]) == (kernel, strategy)), None)


def _gains(rows: Rows) -> str:
    strategies = _strategies(rows)
    lines = []
    for kernel in _kernels(rows):
        found = [_row(rows, kernel, strategy) for strategy in strategies]
        seeds = max(r["seeds"] for r in rows)
        whole = [r["median_ratio"] for r in found if r and r["seeds"] == seeds]
        best = max(whole, default=inf)
        lines.append([kernel, *(_gain(r, best, seeds) if r else "–" for r in found)])
    costs = []
    for strategy in strategies:
        mine = [r for r in rows if r["strategy"] == strategy]
        costs.append(f"{median(r['processor_s'] for r in mine):.0f} s")
    return table(["kernel", *(f"`{s}`" for s in strategies)], [*lines, ["processor", *costs]])


def _gain(row: Mapping[str, Any], best: float, seeds: int) -> str:
    middle, low, high = (100 * (row[key] - 1) for key in ("median_ratio", "low", "high"))
    said = f"{middle:.2f}"
    said = f"**{said}**" if row["median_ratio"] == best else said
    fewer = "" if row["seeds"] == seeds else f", seeds: {row['seeds']}"
    return f"{said} ({low:.2f}–{high:.2f}{fewer})"


def _needed_head() -> str:
    levels = ", ".join(f"{100 * part:.0f}" for part in PARTS)
    return (
        f"Evaluations to {levels} % of the best gain that any of these runs found: median over "
        "seeds, – where at least half of them never got there. Those of `ppo` begin with its "
        "annealing."
    )


def _needed(rows: Rows) -> str:
    strategies = _strategies(rows)
    lines = []
    for kernel in _kernels(rows):
        found = [_row(rows, kernel, strategy) for strategy in strategies]
        best = next(r["best_known"] for r in found if r)
        cells = [" / ".join(_said(_middle(r, p)) for p in PARTS) if r else "–" for r in found]
        lines.append([f"{kernel}, {100 * (best - 1):.2f} %", *cells])
    return table(["kernel, best known", *(f"`{s}`" for s in strategies)], lines)


def _middle(row: Mapping[str, Any], part: float) -> float:
    """Median over seeds of the evaluations needed; infinite where most runs never got there."""
    return median(inf if n is None else n for n in row["evaluations_to"][str(part)])


def _said(evaluations: float) -> str:
    return "–" if evaluations == inf else f"{evaluations:,.0f}"


def saved(rows: Rows, part: float, evaluations: int) -> dict[str, float]:
    """How many times fewer evaluations ``ppo-trained`` needs than ``ppo``, by kernel.

    Who never got there is counted with all its evaluations; a kernel where neither got there says
    nothing and is left out.
    """
    found = {}
    for kernel in _kernels(rows):
        pair = [_row(rows, kernel, strategy) for strategy in ("ppo", "ppo-trained")]
        if all(pair):
            ours, trained = (_middle(row, part) for row in pair if row)
            if min(ours, trained) < inf:
                found[kernel] = min(ours, evaluations) / min(trained, evaluations)
    return found


def _answer(rows: Rows, evaluations: int) -> str:
    said = []
    kernels = _kernels(rows)
    for part in PARTS:
        factors = saved(rows, part, evaluations)
        mean = geometric_mean(factors.get(kernel, 1.0) for kernel in kernels)
        enough = [kernel for kernel, factor in factors.items() if factor >= WANTED]
        said.append(
            f"to {100 * part:.0f} % of the best known **{'yes' if mean >= WANTED else 'no'}**, "
            f"{mean:.1f} times fewer in the geometric mean, {WANTED:.0f} times or more on "
            f"{len(enough)} of {len(kernels)} kernels"
            + (f" ({', '.join(enough)})" if enough else "")
        )
    return (
        f"Does training on other kernels cut evaluations by {WANTED:.0f} times or more? In all: "
        f"{'; '.join(said)}. Evaluations of `ppo` / evaluations of `ppo-trained`, medians over "
        "seeds; who never got there is counted with all its evaluations; where neither did there "
        "is no number below, and 1 in the mean:"
    )


def _savings(rows: Rows, evaluations: int) -> str:
    factors = [saved(rows, part, evaluations) for part in PARTS]
    lines = [
        [kernel, *(f"{f[kernel]:.1f}" if kernel in f else "–" for f in factors)]
        for kernel in _kernels(rows)
    ]
    return table(["kernel", *(f"{100 * part:.0f} %" for part in PARTS)], lines)


def main() -> int:
    if not RESULT.exists():
        print(
            f"{RESULT} is missing; `python -m benchmarks run learning.strategies` makes it",
            file=sys.stderr,
        )
        return 2
    result = load(RESULT)
    write_atomically(PAGE, page(PAGE.read_text(), result, gpu_records()).encode())
    write_atomically(FIGURE, figure(summary(result["records"]), result["evaluations"]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
