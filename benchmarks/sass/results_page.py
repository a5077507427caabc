"""Write docs/results.md, the README's results and what is said beside modelled gains, from the
committed GPU results.

    python -m benchmarks.sass.results_page

The headline's strategy is named here, before anything is measured: the geometric mean over kernels
of the deployed ratio of ``anneal``, median over seeds, at the published small shapes.  Shapes that
fill the GPU stand apart, and so does the best of all strategies and seeds: that is a choice made
afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.harness.generated_regions import README, readme, seeds
from benchmarks.harness.schema import RESULTS, BadResults, Record, Size, measured_files, read
from benchmarks.sass.reasons_section import reasons_section
from nostall.core.files import write_atomically
from nostall.sass.model.agreement import AGREEMENT_FILE, Agreement

PAGE = RESULTS.parents[1] / "docs" / "results.md"
AGREEMENT = RESULTS.parents[1] / "src" / "nostall" / "sass" / "model" / AGREEMENT_FILE
SUITE = RESULTS / "gpu_suite.json"
HEADLINE = "anneal"
ELSEWHERE = {"gpu_game.json": "learning.md"}
"""Files that have a page of their own."""
SIZES: tuple[Size | None, ...] = ("published", "filling", None)

_HEAD = """# Measured results

Written by `python -m benchmarks.sass.results_page` from the JSON files named below, which hold every
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
    "tau",
)


def page(files: Sequence[Path]) -> str:
    """The whole page."""
    parts = [_HEAD]
    if not files:
        parts.append("No results are committed yet.\n")
    for path in files:
        if path.name in ELSEWHERE:
            other = ELSEWHERE[path.name]
            parts.append(f"[{path.name}](../benchmarks/results/{path.name}): [{other}]({other}).\n")
        else:
            parts.append(section(path.name, read(path).records))
    return "\n".join(parts)


def section(name: str, records: Sequence[Record]) -> str:
    """The headline and the tables of one file."""
    lines = [f"## [{name}](../benchmarks/results/{name})", ""]
    lines += [_origin(records), ""]
    for size in SIZES:
        mine = [r for r in records if r.size == size]
        if mine:
            lines += [*_headline(size, mine, records), ""]
    lines += [_afterwards(records), ""]
    strategies = sorted({r.strategy for r in records}, key=lambda s: (s != HEADLINE, s))
    lines += _table(("kernel", *strategies, "best of all"), _summary(records, strategies))
    lines += reasons_section(records, HEADLINE)
    lines += _agreement(records)
    order = {kernel: number for number, kernel in enumerate(_kernels(records))}
    ranked = sorted(records, key=lambda r: (order[r.kernel], strategies.index(r.strategy), r.seed))
    # The last column is the model's; it is left out where the model was not asked.
    width = len(_COLUMNS) - all(r.modelled is None for r in records)
    rows = [_row(r)[:width] for r in ranked]
    lines += ["", "Every search:", "", *_table(_COLUMNS[:width], rows)]
    return "\n".join(lines) + "\n"


def deployed(records: Sequence[Record], strategy: str) -> dict[str, float]:
    """Median over seeds of the deployed ratio, by kernel."""
    return _by_kernel([r for r in records if r.strategy == strategy], median)


def best_of_all(records: Sequence[Record]) -> dict[str, float]:
    """The largest deployed ratio of any strategy and seed, by kernel."""
    return _by_kernel(records, max)


def _by_kernel(
    records: Sequence[Record],
    choose: Callable[[list[float]], float],
    value: Callable[[Record], float] = lambda r: r.deployed_ratio,
) -> dict[str, float]:
    return {
        kernel: choose([value(r) for r in records if r.kernel == kernel])
        for kernel in _kernels(records)
    }


def _kernels(records: Sequence[Record]) -> list[str]:
    """In the order of the file."""
    return list(dict.fromkeys(r.kernel for r in records))


def faster_path(records: Sequence[Record]) -> list[Record]:
    """Without the slower of a kernel's two kinds of matrix instructions."""
    times = _by_kernel(records, median, lambda r: r.original_us)
    problem = {r.kernel: r.kernel.removesuffix(f"@{r.instructions}") for r in records}
    best: dict[str, str] = {}
    for kernel in sorted(times, key=lambda kernel: times[kernel]):
        best.setdefault(problem[kernel], kernel)
    return [r for r in records if r.kernel in best.values()]


def _headline(
    size: Size | None, records: Sequence[Record], all_of_file: Sequence[Record]
) -> list[str]:
    """What the named strategy deploys at one size; the published shapes are the headline."""
    sized = any(r.size is not None for r in all_of_file)
    what = {"published": "Published small shapes", "filling": "Shapes that fill the GPU"}
    title = "Headline" if not sized else what.get(size or "", "Other kernels")
    if sized and size == "published":
        title = f"Headline, {title[0].lower()}{title[1:]}"
    kept = deployed(records, HEADLINE)
    if not kept:
        return [f"{title}: strategy `{HEADLINE}` was not measured."]
    value = f"{title}: {geometric_mean(kept.values()):.4f}"
    value = f"**{value}**" if title.startswith("Headline") else value
    said = [
        f"{value}, the geometric mean over {len(kept)} kernels of what `{HEADLINE}` deploys, "
        f"median over {seeds(records, HEADLINE)}; "
        f"between {min(kept.values()):.4f} and {max(kept.values()):.4f}."
    ]
    faster = deployed(faster_path(records), HEADLINE)
    if faster and len(faster) < len(kept):
        said.append(
            f"Counting only the faster of a kernel's two kinds of matrix instructions: "
            f"{geometric_mean(faster.values()):.4f} over {len(faster)} kernels."
        )
    return said


def _afterwards(records: Sequence[Record]) -> str:
    best = best_of_all(records)
    return (
        f"Chosen afterwards, so not the headline: the best of all strategies and seeds has "
        f"{geometric_mean(best.values()):.4f} over {len(best)} kernels."
    )


def _agreement(records: Sequence[Record]) -> list[str]:
    """How the SM model ranks the candidates that were measured."""
    asked = [r for r in records if r.modelled is not None]
    if not asked:
        return []
    rows = []
    for kernel, found in taus(asked).items():
        said = [r.modelled for r in asked if r.kernel == kernel and r.modelled is not None]
        count = sum(len(m.us) for m in said)
        span = f"{median(found):.2f} [{min(found):.2f}, {max(found):.2f}]" if found else "-"
        error = f"{100 * median(m.error for m in said):.0f} %"
        rows.append([kernel, span, error, f"{count:,}"])
    head = (
        "The SM model (`--objective model`) on candidates that were measured: Kendall's tau, "
        "median and range over the searches (1: it ranks them as the GPU does, 0: its ranking "
        "says nothing), and the median error of its times:"
    )
    return ["", head, "", *_table(("kernel", "tau", "error", "candidates"), rows)]


def taus(records: Sequence[Record]) -> dict[str, list[float]]:
    """Kendall's tau of each search where it is known, by kernel."""
    found: dict[str, list[float]] = {kernel: [] for kernel in _kernels(records)}
    for r in records:
        if r.modelled is not None and r.modelled.kendall_tau is not None:
            found[r.kernel].append(r.modelled.kendall_tau)
    return found


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


def _row(r: Record) -> list[str]:
    ratio, null, best = r.failure, "-", "-"
    if r.ratio is not None and r.best_us is not None:
        ratio = f"{r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]"
        null = f"[{r.null_low:.4f}, {r.null_high:.4f}]"
        best = f"{r.best_us:.2f}"
    cells = [r.kernel, r.strategy, str(r.seed), f"{r.original_us:.2f}", best, ratio, null]
    cells += [f"{r.deployed_ratio:.4f}", f"{r.candidates:,}", str(r.faults)]
    tau = r.modelled.kendall_tau if r.modelled is not None else None
    cells.append("-" if tau is None else f"{tau:.2f}")
    return cells


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


def agreement_of(records: Sequence[Record], source: str) -> Agreement | None:
    """What ``nostall tune`` says beside a modelled gain; None when the model was never asked."""
    asked = [r for r in records if r.modelled is not None]
    tau = {kernel: round(median(found), 4) for kernel, found in taus(asked).items() if found}
    if not tau:
        return None
    count = sum(len(r.modelled.us) for r in asked if r.modelled is not None)
    gpu = ", ".join(sorted({r.gpu for r in asked}))
    return Agreement(gpu=gpu, source=source, candidates=count, tau=tau)


def newest_agreement(files: Sequence[Path]) -> Agreement | None:
    """Of the last file, by name, in which the model was asked."""
    found = [agreement_of(read(path).records, path.name) for path in files]
    return next((a for a in reversed(found) if a is not None), None)


def suite() -> Sequence[Record]:
    """The records that the README shows; none before they are measured."""
    return read(SUITE).records if SUITE.exists() else ()


def main() -> int:
    try:
        files = measured_files()
        text, found, records = page(files), newest_agreement(files), suite()
    except BadResults as error:
        print(error, file=sys.stderr)
        return 2
    write_atomically(PAGE, text.encode())
    write_atomically(README, readme(README.read_text(), found, records).encode())
    if found is not None:
        write_atomically(AGREEMENT, (found.model_dump_json(indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
