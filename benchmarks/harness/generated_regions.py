"""The parts of README.md that are written from committed GPU results.

A region stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; ``benchmarks.sass.results_page`` writes
them, and a test holds them to the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median
from textwrap import fill

from benchmarks.harness.result_file import ROOT
from benchmarks.harness.schema import Record
from nostall.sass.model.agreement import Agreement

README = ROOT.parent / "README.md"
_COLUMNS = ("original us", "`anneal`, seed 0", "`anneal` deployed", "`sip` deployed")
_SHAPES = {"published": "kernel, published small shapes", "filling": "kernel, filling shapes"}


def readme(text: str, found: Agreement | None, records: Sequence[Record]) -> str:
    """The README with what the records say."""
    said = "How well it ranks what a GPU measures is not recorded yet."
    if found is not None:
        said = wrapped(
            f"{found.sentence[0].upper()}{found.sentence[1:]} "
            f"([JSON](benchmarks/results/{found.source}))."
        )
    text = region(text, "agreement", said)
    return region(text, "results", results(records)) if records else text


def results(records: Sequence[Record]) -> str:
    """How it was measured, the headline, and a table for each size."""
    sizes = [s for s in ("published", "filling", None) if any(r.size == s for r in records)]
    parts = [wrapped(_origin(records))]
    for size in sizes:
        mine = [r for r in records if r.size == size]
        title = _SHAPES.get(size or "", "other kernels")
        rows = [_row(kernel, mine) for kernel in dict.fromkeys(r.kernel for r in mine)]
        head = " | ".join((title, *_COLUMNS))
        parts.append("\n".join([f"| {head} |", "|---" * 5 + "|", *rows]))
    return "\n\n".join(parts)


def seeds(records: Sequence[Record], strategy: str) -> str:
    """How many seeds each kernel was searched with, in words."""
    mine = [r for r in records if r.strategy == strategy]
    counts = {len({r.seed for r in mine if r.kernel == k}) for k in {r.kernel for r in mine}}
    least, most = min(counts), max(counts)
    if most == 1:
        return "one seed"
    return f"{most} seeds" if least == most else f"{least} to {most} seeds"


def _origin(records: Sequence[Record]) -> str:
    gpus = " and ".join(sorted({f"{r.gpu} (driver {r.driver})" for r in records}))
    tried = [len(r.baseline) for r in records if r.baseline is not None]
    start = "as their authors wrote them"
    if tried:
        start = (
            f"each Triton kernel from the fastest of {min(tried)} to {max(tried)} compiler "
            "configurations (tiles, warps, stages, registers; "
            "[JSON](benchmarks/sass/results/compiler_baseline.json))"
        )
    small = [r for r in records if r.size == "published"] or list(records)
    kept = deployed(small, "anneal").values()
    return (
        f"Measured on {gpus}, warm L2, {start}. Original / candidate time: that of `anneal`'s "
        "seed 0 with its 95 % interval, then what is deployed, 1 where the original is kept, "
        f"median over {seeds(records, 'anneal')}. The headline, named beforehand, is `anneal` on "
        f"the published small shapes: **{geometric_mean(kept):.4f}** in the geometric mean over "
        f"{len(kept)} kernels, between {min(kept):.4f} and {max(kept):.4f} "
        "(`python -m benchmarks run sass.suite`, "
        "[JSON with samples and nulls](benchmarks/sass/results/suite.json.gz), commands and all "
        "searches: [docs/results.md](docs/results.md))."
    )


def _row(kernel: str, records: Sequence[Record]) -> str:
    mine = [r for r in records if r.kernel == kernel]
    first = next((r for r in mine if r.strategy == "anneal" and r.seed == 0), None)
    ratio = "–"
    if first is not None and first.ratio is not None:
        ratio = f"{first.ratio:.4f} [{first.ci_low:.4f}, {first.ci_high:.4f}]"
    cells = [kernel, f"{median(r.original_us for r in mine):.1f}", ratio]
    for strategy in ("anneal", "sip"):
        value = deployed(mine, strategy).get(kernel)
        cells.append("–" if value is None else f"{value:.4f}")
    return f"| {' | '.join(cells)} |"


def deployed(records: Sequence[Record], strategy: str) -> dict[str, float]:
    mine = [r for r in records if r.strategy == strategy]
    return {
        kernel: median(r.deployed_ratio for r in mine if r.kernel == kernel)
        for kernel in dict.fromkeys(r.kernel for r in mine)
    }


def region(text: str, name: str, content: str) -> str:
    before, opened, rest = text.partition(f"<!-- {name} -->")
    _, closed, after = rest.partition(f"<!-- /{name} -->")
    return f"{before}{opened}\n{content}\n{closed}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")


def wrapped(text: str) -> str:
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)
