"""Section of the results page: what the searches of the suite gained on a GPU.

The headline was chosen before the measurement: the geometric mean over kernels of the deployed
ratio of ``anneal``, median over seeds, at the published small shapes. Shapes that fill the GPU are
listed separately. So is the best of all strategies and seeds, because it is chosen afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.schema import Record, Size
from benchmarks.harness.template import render
from benchmarks.sass.pages.agreement import agreement_table

HEADLINE = "anneal"
"""Strategy of the headline."""
_TITLES: dict[Size | None, str] = {
    "published": "Published small shapes",
    "filling": "Shapes that fill the GPU",
    None: "Other kernels",
}
_COLUMNS = (
    "kernel", "strategy", "seed", "original us", "best us", "ratio", "null", "deployed",
    "candidates", "faults", "tau",
)  # fmt: skip


def suite_section(path: Path, records: Sequence[Record]) -> str:
    """Headline, summary, agreement of the SM model, and one row for each search."""
    strategies = sorted({r.strategy for r in records}, key=lambda s: (s != HEADLINE, s))
    sizes = [size for size in _TITLES if any(r.size == size for r in records)]
    best = best_of_all(records)
    head, searches = _searches(records, strategies)
    values = {
        **_origin(records),
        "file": path,
        "headlines": "\n\n".join(_headline(size, records) for size in sizes),
        "best": "Chosen afterwards, so not the headline: the best of all strategies and seeds is "
        f"{geometric_mean(best.values()):.4f} over {len(best)} kernels.",
        "strategies": [f"`{strategy}`" for strategy in strategies],
        "summary": _summary(records, strategies),
        "agreement": agreement_table(records),
        "head": head,
        "searches": searches,
    }
    return render(__file__, values)


def deployed(records: Sequence[Record], strategy: str) -> dict[str, float]:
    """Deployed ratio of a strategy by kernel: the median over seeds."""
    return _by_kernel([r for r in records if r.strategy == strategy], median)


def best_of_all(records: Sequence[Record]) -> dict[str, float]:
    """Largest deployed ratio of any strategy and seed, by kernel."""
    return _by_kernel(records, max)


def faster_instructions(records: Sequence[Record]) -> list[Record]:
    """The records without the slower of a kernel's two kinds of matrix instructions."""
    times = _by_kernel(records, median, lambda r: r.original_us)
    problem = {r.kernel: r.kernel.removesuffix(f"@{r.instructions}") for r in records}
    fastest: dict[str, str] = {}
    for kernel in sorted(times, key=lambda kernel: times[kernel]):
        fastest.setdefault(problem[kernel], kernel)
    return [r for r in records if r.kernel in fastest.values()]


def seeds(records: Sequence[Record], strategy: str) -> str:
    """How many seeds each kernel was searched with, in words."""
    kernels = {r.kernel for r in records if r.strategy == strategy}
    counts = {
        len({r.seed for r in records if (r.kernel, r.strategy) == (kernel, strategy)})
        for kernel in kernels
    }
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one seed"
    return f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"


def _by_kernel(
    records: Sequence[Record],
    choose: Callable[[list[float]], float],
    value: Callable[[Record], float] = lambda r: r.deployed_ratio,
) -> dict[str, float]:
    kernels = dict.fromkeys(r.kernel for r in records)
    return {kernel: choose([value(r) for r in records if r.kernel == kernel]) for kernel in kernels}


def _origin(records: Sequence[Record]) -> dict[str, str]:
    """GPU, versions, days, and which compiler configuration the search started from."""
    days = sorted({r.date.date().isoformat() for r in records})
    tried = [len(r.baseline) for r in records if r.baseline is not None]
    start = "The original is the kernel as its author wrote it."
    if tried:
        start = (
            f"The original of a Triton kernel is the fastest of {min(tried)} to {max(tried)} "
            "compiler configurations (tiles, warps, stages, registers)."
        )
    return {
        "gpus": "; ".join(sorted({f"{r.gpu}, driver {r.driver}" for r in records})),
        "triton": ", ".join(sorted({r.versions.get("triton", "unknown") for r in records})),
        "days": " to ".join(dict.fromkeys((days[0], days[-1]))),
        "start": start,
    }


def _headline(size: Size | None, all_records: Sequence[Record]) -> str:
    """The deployed gain of the headline's strategy at one size."""
    records = [r for r in all_records if r.size == size]
    is_sized = any(r.size is not None for r in all_records)
    title = _TITLES[size] if is_sized else "Headline"
    if is_sized and size == "published":
        title = f"Headline, {title[0].lower()}{title[1:]}"
    ratios = deployed(records, HEADLINE)
    if not ratios:
        return f"{title}: strategy `{HEADLINE}` was not measured."
    value = f"{title}: {geometric_mean(ratios.values()):.4f}"
    value = f"**{value}**" if title.startswith("Headline") else value
    sentences = [
        f"{value}, the geometric mean over {len(ratios)} kernels of the ratio that `{HEADLINE}` "
        f"deploys (median over {seeds(records, HEADLINE)}; {min(ratios.values()):.4f} to "
        f"{max(ratios.values()):.4f})."
    ]
    faster = deployed(faster_instructions(records), HEADLINE)
    if faster and len(faster) < len(ratios):
        sentences.append(
            "With only the faster of a kernel's two kinds of matrix instructions: "
            f"{geometric_mean(faster.values()):.4f} over {len(faster)} kernels."
        )
    return " ".join(sentences)


def _summary(records: Sequence[Record], strategies: Sequence[str]) -> list[dict[str, Any]]:
    ratios = [deployed(records, strategy) for strategy in strategies]
    times = _by_kernel(records, median, lambda r: r.original_us)
    return [
        {
            "kernel": kernel,
            "original_us": times[kernel],
            "ratios": [ratio.get(kernel) for ratio in ratios],
            "best": best,
        }
        for kernel, best in best_of_all(records).items()
    ]


def _searches(
    records: Sequence[Record], strategies: Sequence[str]
) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows of the table of all searches; without tau if the model was not asked."""
    kernels = list(dict.fromkeys(r.kernel for r in records))
    ordered = sorted(
        records, key=lambda r: (kernels.index(r.kernel), strategies.index(r.strategy), r.seed)
    )
    width = len(_COLUMNS) - all(r.modelled is None for r in records)
    return _COLUMNS[:width], [_row(r)[:width] for r in ordered]


def _row(r: Record) -> list[str]:
    ratio, null, best = r.failure, "–", "–"
    if r.ratio is not None and r.best_us is not None:
        ratio = f"{r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]"
        null = f"[{r.null_low:.4f}, {r.null_high:.4f}]"
        best = f"{r.best_us:.2f}"
    tau = r.modelled.kendall_tau if r.modelled is not None else None
    return [
        *(r.kernel, r.strategy, str(r.seed), f"{r.original_us:.2f}", best, ratio, null),
        *(f"{r.deployed_ratio:.4f}", f"{r.candidates:,}", str(r.faults)),
        "–" if tau is None else f"{tau:.2f}",
    ]
