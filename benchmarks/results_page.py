"""Write docs/results.md from the committed GPU results.

    python -m benchmarks.results_page

The headline's strategy is named here, before anything is measured: the geometric mean over kernels
of the deployed ratio of ``anneal``, median over seeds.  The best of all strategies and seeds is a
choice made afterwards, so it stands apart and is not the headline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.record import RESULTS, BadResults, Record, measured_files, read
from nostall.core.run import write_atomically

PAGE = RESULTS.parents[1] / "docs" / "results.md"
HEADLINE = "anneal"

_HEAD = """# Measured results

Written by `python -m benchmarks.results_page` from the JSON files named below, which hold every
sample; their form is [schema.json](../benchmarks/results/schema.json). A ratio is original /
candidate time, so above 1 is faster, with its bootstrap 95 % interval; the null is the original
against itself. *Deployed* is what a user gets: 1 where the original is kept because the interval
does not clear 1 and the null. How it is measured: [measuring.md](measuring.md).
"""
_COLUMNS = (
    "kernel",
    "strategy",
    "seed",
    "original us",
    "best us",
    "ratio",
    "null",
    "deployed",
    "candidates",
    "faults",
)


def page(files: Sequence[Path]) -> str:
    """The whole page."""
    parts = [_HEAD]
    if not files:
        parts.append("No results are committed yet.\n")
    for path in files:
        parts.append(section(path.name, read(path).records))
    return "\n".join(parts)


def section(name: str, records: Sequence[Record]) -> str:
    """The headline and the tables of one file."""
    lines = [f"## [{name}](../benchmarks/results/{name})", ""]
    lines += [_origin(records), "", *_headline(records), ""]
    strategies = sorted({r.strategy for r in records}, key=lambda s: (s != HEADLINE, s))
    lines += _table(("kernel", *strategies, "best of all"), _summary(records, strategies))
    taus = any(r.kendall_tau is not None for r in records)
    columns = (*_COLUMNS, "Kendall tau") if taus else _COLUMNS
    order = {kernel: number for number, kernel in enumerate(_kernels(records))}
    ranked = sorted(records, key=lambda r: (order[r.kernel], strategies.index(r.strategy), r.seed))
    lines += ["", "Every search:", "", *_table(columns, [_row(r, taus) for r in ranked])]
    return "\n".join(lines) + "\n"


def deployed(records: Sequence[Record], strategy: str) -> dict[str, float]:
    """Median over seeds of the deployed ratio, by kernel."""
    return _by_kernel([r for r in records if r.strategy == strategy], median)


def best_of_all(records: Sequence[Record]) -> dict[str, float]:
    """The largest deployed ratio of any strategy and seed, by kernel."""
    return _by_kernel(records, max)


def _by_kernel(
    records: Sequence[Record], choose: Callable[[list[float]], float]
) -> dict[str, float]:
    return {
        kernel: choose([r.deployed_ratio for r in records if r.kernel == kernel])
        for kernel in _kernels(records)
    }


def _kernels(records: Sequence[Record]) -> list[str]:
    """In the order of the file."""
    return list(dict.fromkeys(r.kernel for r in records))


def _headline(records: Sequence[Record]) -> list[str]:
    kept = deployed(records, HEADLINE)
    if not kept:
        return [f"No headline: strategy `{HEADLINE}` was not measured."]
    best = best_of_all(records)
    seeds = len({r.seed for r in records if r.strategy == HEADLINE})
    over = f"{seeds} seeds" if seeds > 1 else "one seed"
    return [
        f"**Headline: {geometric_mean(kept.values()):.4f}**, the geometric mean over {len(kept)} "
        f"kernels of what `{HEADLINE}` deploys, median over {over}.",
        "",
        f"Chosen afterwards, so not the headline: the best of all strategies and seeds has "
        f"{geometric_mean(best.values()):.4f} over {len(best)} kernels.",
    ]


def _origin(records: Sequence[Record]) -> str:
    """Where the records come from."""
    days = sorted({r.date.date().isoformat() for r in records})
    gpus = sorted({f"{r.gpu}, driver {r.driver}" for r in records})
    tools = sorted({f"Triton {r.versions.get('triton', 'unknown')}" for r in records})
    tried = [len(r.baseline) for r in records if r.baseline is not None]
    kind = f"the fastest of at least {min(tried)} compiler configurations" if tried else ""
    if len(tried) < len(records):
        kind += f"{' for some, ' if kind else ''}the kernel as its author wrote it"
    commands = "; ".join(f"`{c}`" for c in sorted({r.command for r in records}))
    return (
        f"{'; '.join(gpus)}; {', '.join(tools)}; {' to '.join(dict.fromkeys((days[0], days[-1])))}."
        f" The original is {kind}. Command: {commands}."
    )


def _summary(records: Sequence[Record], strategies: Sequence[str]) -> list[list[str]]:
    by_strategy = [deployed(records, strategy) for strategy in strategies]
    best = best_of_all(records)
    return [
        [k, *(f"{d[k]:.4f}" if k in d else "-" for d in by_strategy), f"{best[k]:.4f}"]
        for k in best
    ]


def _row(r: Record, taus: bool) -> list[str]:
    ratio, null, best = r.failure, "-", "-"
    if r.ratio is not None and r.best_us is not None:
        ratio = f"{r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]"
        null = f"[{r.null_low:.4f}, {r.null_high:.4f}]"
        best = f"{r.best_us:.2f}"
    cells = [r.kernel, r.strategy, str(r.seed), f"{r.original_us:.2f}", best, ratio, null]
    cells += [f"{r.deployed_ratio:.4f}", f"{r.candidates:,}", str(r.faults)]
    if taus:
        cells.append("-" if r.kendall_tau is None else f"{r.kendall_tau:.2f}")
    return cells


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def main() -> int:
    try:
        text = page(measured_files())
    except BadResults as error:
        print(error, file=sys.stderr)
        return 2
    write_atomically(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
