"""The generated parts of README.md, of the documentation's start page and of benchmarks/README.md.

A generated region is the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``. The command
``python -m benchmarks page readme`` writes the regions and the picture from committed results.
"""

from __future__ import annotations

from statistics import median

from benchmarks.front import measured_code
from benchmarks.front.headline import HEAD
from benchmarks.front.leads import lead_pictures
from benchmarks.front.levels import headlines
from benchmarks.front.picture import FOLDER, pictures
from benchmarks.front.predictions import predictions
from benchmarks.harness.markdown import region, table, wrapped
from benchmarks.harness.result_file import ROOT
from benchmarks.registry import BENCHMARKS, Benchmark
from nostall.cli.verbs import LEVELS
from nostall.core.files.atomic import write_atomically
from nostall.sass.model.agreement import RANKING_WORTH, load_agreement

README = ROOT.parent / "README.md"
START_PAGE = ROOT.parent / "docs" / "index.md"
TABLE = ROOT / "README.md"
LEVEL_HEAD = ("you have", "begin with", "you get", "commands")
CHANGED = (
    "Time of the baseline / time with nostall: above 1 nostall is faster. Ratios are of what "
    "ships; where a comparison keeps the baseline, the ratio is 1. †: the code has changed since "
    "that day; the number is of the older code."
)


def readme(text: str) -> str:
    """README.md with new regions: the headlines, predictions, and the worth of the SM model."""
    text = region(text, "headlines", table(HEAD, [h.row for h in headlines()]))
    text = region(text, "ratios", wrapped(CHANGED))
    text = region(text, "levels", table(LEVEL_HEAD, _levels("docs/")))
    text = region(text, "predictions", table(("prediction", "error", "of"), predictions()))
    return region(text, "agreement", wrapped(agreement()))


def start_page(text: str) -> str:
    """docs/index.md with the same table, with links of its own folder."""
    rows = [[cell.replace("(docs/", "(") for cell in h.row] for h in headlines()]
    text = region(text, "headlines", table(HEAD, rows))
    text = region(text, "levels", table(LEVEL_HEAD, _levels("")))
    return region(text, "ratios", wrapped(CHANGED))


def _levels(folder: str) -> list[tuple[str, ...]]:
    """Rows of the levels, with links to the page to read first."""
    return [
        (
            f"[{level.have}]({folder}{level.page})",
            f"`{level.begin}`",
            level.gives,
            ", ".join(f"`{verb}`" for verb in level.verbs),
        )
        for level in LEVELS
    ]


def agreement() -> str:
    """What the ranking of the SM model is worth, in short."""
    found = load_agreement()
    evidence = ""
    if found is not None:
        evidence = f" (Kendall's tau {median(found.tau.values()):.2f} on {found.gpu})"
    return f"`--objective model` needs no GPU, but the model {RANKING_WORTH}{evidence}."


def benchmark_table(text: str) -> str:
    """benchmarks/README.md with a new table: one row for each benchmark."""
    head = ("benchmark", "question", "needs", "results", "page")
    return region(text, "benchmarks", table(head, [_row(b) for b in BENCHMARKS]))


def _row(benchmark: Benchmark) -> tuple[str, ...]:
    files = " ".join(f"[{file.rpartition('/')[2]}]({file})" for file in benchmark.results)
    page = f"[{benchmark.page}](../docs/results/{benchmark.page})" if benchmark.page else "–"
    return f"`{benchmark.name}`", benchmark.question, benchmark.needs, files or "–", page


def write() -> None:
    """Write the record of the measured code, the regions of all files, and the pictures."""
    used = headlines()
    measured_code.update((file, h.code) for h in used for file in h.files)
    for path, change in ((README, readme), (START_PAGE, start_page), (TABLE, benchmark_table)):
        write_atomically(path, change(path.read_text("utf-8")).encode())
    FOLDER.mkdir(exist_ok=True)
    for name, text in (pictures(used) | lead_pictures()).items():
        write_atomically(FOLDER / name, text.encode())
