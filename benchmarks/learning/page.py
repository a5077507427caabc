"""Write ``docs/results/learning.md``: learning strategies compared with annealing.

python -m benchmarks page learning
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import read
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
    result = load(RESULT)
    parts = [
        compared(result, summary(result["records"])),
        measured.measured(read(measured.RESULT).records),
        _steps(),
    ]
    return page("Strategies that learn", "python -m benchmarks page learning", parts)


def write() -> None:
    """Write the page and its figure."""
    result = load(RESULT)
    write_atomically(PAGE, text().encode())
    write_atomically(FIGURE, figure(summary(result["records"]), result["evaluations"]).encode())


def compared(result: Mapping[str, Any], rows: Rows) -> str:
    """Modelled comparison: gains, evaluations to parts of the best gain, savings by training."""
    evaluations = result["evaluations"]
    parts = ["## On the SM model, at equal evaluations", wrapped(_origin(result, rows))]
    parts += [_gains(rows), f"![learning curves]({FIGURE.name})"]
    parts += ["### Evaluations to a part of the best gain", wrapped(_needed_head()), _needed(rows)]
    parts += ["### Does training on other kernels help?", wrapped(_answer(rows, evaluations))]
    return "\n\n".join([*parts, _savings(rows, evaluations)])


def _steps() -> str:
    record = load(STEPS)
    intro = wrapped(
        "Steps of the game per second of processor time on the SM model, random legal actions "
        f"(`python -m benchmarks run learning.steps_per_second`, {link(STEPS)}). Much of a step "
        "is the model, if it simulates many warps."
    )
    head = ("kernel", "instructions", "issues simulated", "steps/s, matrix", "steps/s, graph",
            "model alone")  # fmt: skip
    return f"## Speed of the environment\n\n{intro}\n\n{table(head, _step_rows(record))}"


def _step_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """One row for each kernel; the file has one record for each kind of observation."""
    by_kernel: dict[str, dict[str, Mapping[str, Any]]] = {}
    for item in record["records"]:
        by_kernel.setdefault(item["kernel"], {})[item["observation"]] = item
    rows = []
    for kernel, kinds in by_kernel.items():
        matrix, graph = kinds["matrix"], kinds["graph"]
        numbers = [matrix["instructions"], matrix["issues_per_evaluation"]]
        numbers += [kind["steps_per_second"] for kind in (matrix, graph)]
        numbers.append(matrix["model_evaluations_per_second"])
        rows.append([kernel, *(f"{number:,}" for number in numbers)])
    return rows


def _origin(result: Mapping[str, Any], rows: Rows) -> str:
    seeds = max(row["seeds"] for row in rows)
    return (
        f"*Modelled*, {result['arch']}: {result['evaluations']:,} evaluations of each of {seeds} "
        f"seeds on {result['processor']}, one thread (`python -m benchmarks run "
        f"learning.strategies`, {result['date'][:10]}, {link(RESULT, 'JSON with every curve')}). "
        f"`ppo-trained` starts from a policy of {result['rollouts']} rollouts of each kernel of "
        "the other half (kernels by name, every second one); those steps are not among its "
        "evaluations. `sip` needs floating-point work, and restarts when its published run ends. "
        "The table has the final gain in per cent: median over seeds with the lowest and the "
        "highest, and the processor seconds of one run, median over kernels."
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
        cells = [_row(rows, kernel, strategy) for strategy in strategies]
        seeds = max(r["seeds"] for r in rows)
        complete = [r["median_ratio"] for r in cells if r and r["seeds"] == seeds]
        best = max(complete, default=inf)
        lines.append([kernel, *(_gain(r, best, seeds) if r else "–" for r in cells)])
    costs = []
    for strategy in strategies:
        strategy_rows = [r for r in rows if r["strategy"] == strategy]
        costs.append(f"{median(r['processor_s'] for r in strategy_rows):.0f} s")
    return table(["kernel", *(f"`{s}`" for s in strategies)], [*lines, ["processor", *costs]])


def _gain(row: Mapping[str, Any], best: float, seeds: int) -> str:
    middle, low, high = (100 * (row[key] - 1) for key in ("median_ratio", "low", "high"))
    gain = f"{middle:.2f}"
    gain = f"**{gain}**" if row["median_ratio"] == best else gain
    fewer = "" if row["seeds"] == seeds else f", seeds: {row['seeds']}"
    return f"{gain} ({low:.2f}–{high:.2f}{fewer})"


def _needed_head() -> str:
    levels = ", ".join(f"{100 * part:.0f}" for part in PARTS)
    return (
        f"Evaluations until {levels} % of the best gain of any of these runs is reached: median "
        "over seeds; – if at least half of the seeds never reach it. The evaluations of `ppo` "
        "include its annealing at the start."
    )


def _needed(rows: Rows) -> str:
    strategies = _strategies(rows)
    lines = []
    for kernel in _kernels(rows):
        runs = [_row(rows, kernel, strategy) for strategy in strategies]
        best = next(r["best_known"] for r in runs if r)
        cells = [" / ".join(_number(_middle(r, p)) for p in PARTS) if r else "–" for r in runs]
        lines.append([f"{kernel}, {100 * (best - 1):.2f} %", *cells])
    return table(["kernel, best known", *(f"`{s}`" for s in strategies)], lines)


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
    for kernel in _kernels(rows):
        pair = [_row(rows, kernel, strategy) for strategy in ("ppo", "ppo-trained")]
        if all(pair):
            untrained, trained = (_middle(row, part) for row in pair if row)
            if min(untrained, trained) < inf:
                factors[kernel] = min(untrained, evaluations) / min(trained, evaluations)
    return factors


def _answer(rows: Rows, evaluations: int) -> str:
    answers = []
    kernels = _kernels(rows)
    for part in PARTS:
        factors = saved(rows, part, evaluations)
        mean = geometric_mean(factors.get(kernel, 1.0) for kernel in kernels)
        enough = [kernel for kernel, factor in factors.items() if factor >= TARGET]
        answers.append(
            f"to {100 * part:.0f} % of the best known **{'yes' if mean >= TARGET else 'no'}**, "
            f"{mean:.1f} times fewer in the geometric mean, {TARGET:.0f} times or more on "
            f"{len(enough)} of {len(kernels)} kernels"
            + (f" ({', '.join(enough)})" if enough else "")
        )
    return (
        f"Target: {TARGET:.0f} times fewer evaluations. In all: {'; '.join(answers)}. The table "
        "has the evaluations of `ppo` divided by those of `ppo-trained`, medians over seeds. A "
        "strategy that never reaches the part counts with all its evaluations. If neither reaches "
        "it, the table has no number, and the mean counts 1."
    )


def _savings(rows: Rows, evaluations: int) -> str:
    factors = [saved(rows, part, evaluations) for part in PARTS]
    lines = [
        [kernel, *(f"{f[kernel]:.1f}" if kernel in f else "–" for f in factors)]
        for kernel in _kernels(rows)
    ]
    return table(["kernel", *(f"{100 * part:.0f} %" for part in PARTS)], lines)
