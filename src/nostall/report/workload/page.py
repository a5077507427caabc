"""Put the pages together: one HTML file with style and figures inside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nostall import __version__
from nostall.core.files import write_atomically
from nostall.report.workload.plots import Line, columns, curves, stacked, steps
from nostall.workload import Architecture
from nostall.workload.answers import JobsAnswer, TracesAnswer
from nostall.workload.answers.jobs import FACTORS
from nostall.workload.model import PARTS as MODEL_PARTS
from nostall.workload.timeline.analysis import PARTS
from nostall.workload.timeline.strip import strip

SLICES = 320
"""Columns of a timeline."""
MOST_DETAILED = 8
"""GPUs whose timeline and kernels are shown; the others are in the overview."""
MOST_KERNELS = 20
MOST_JOBS = 15
MOST_LETTERS = 25

MODEL_STYLES = {
    "data": "c-data",
    "compute": "c-compute",
    "memory": "c-memory",
    "weights": "c-weights",
}
STYLES = {part: f"c-{part}" for part in PARTS}
KIND_STYLES = ("c-compute", "c-memory", "c-weights", "c-data", "c-copies")


def write_page(answer: JobsAnswer | TracesAnswer, path: Path) -> Path:
    """Write the page of an answer to ``path``; it is one file that needs no network."""
    page = _jobs(answer) if isinstance(answer, JobsAnswer) else _traces(answer)
    write_atomically(path, page.encode())
    return path


def _jobs(answer: JobsAnswer) -> str:
    population = answer.population
    rows = [(f"{g.name} ({g.jobs} jobs)", g.by_gpu) for g in answer.groups]
    lines = {}
    for by in ("job", "gpu"):
        found = []
        for part in MODEL_PARTS:
            series = population.cdf(lambda s, part=part: s.share(part), by)  # type: ignore[misc]
            corners = steps(series.values.tolist(), series.cumulative.tolist())
            found.append(Line(part, f"l-{part}", *corners))
        lines[by] = found
    weights = population.weights("gpu")
    sensitivity = [
        Line(s.resource.value, f"l-{s.resource.value}", FACTORS, s.mean(weights))
        for s in answer.sweeps
    ]
    gains = [
        Line(p.target, f"l-{at}", *_distribution(answer, p.target))
        for at, p in enumerate(answer.ported)
    ]
    return _render(
        "jobs.html",
        answer=answer,
        shares=stacked(rows, MODEL_STYLES),
        each=stacked(
            [
                (_short(job.name), {part: found.share(part) for part in MODEL_PARTS})
                for job, found in answer.largest(MOST_JOBS)
            ],
            MODEL_STYLES,
        ),
        by_job=curves(lines["job"], "modelled share of a step", "jobs at or below", percent=True),
        by_gpu=curves(lines["gpu"], "modelled share of a step", "GPU time", percent=True),
        sensitivity=curves(sensitivity, "times its rate", "modelled mean speed-up", log=True),
        gains=curves(
            gains, "modelled throughput, times", "jobs at or below", percent=True, log=True
        ),
        parts=MODEL_STYLES,
    )


def _short(name: str) -> str:
    """Both ends of a name: files of one job differ at either."""
    if len(name) <= MOST_LETTERS:
        return name
    half = (MOST_LETTERS - 1) // 2
    return f"{name[: MOST_LETTERS - 1 - half]}…{name[-half:]}"


def _distribution(answer: JobsAnswer, target: str) -> tuple[list[float], list[float]]:
    """The CDF of the throughput gain of PS/Worker jobs ported to ``target``."""
    workers = answer.population.select(Architecture.PS_WORKER)
    assert workers is not None
    gains = sorted(p.throughput for p in workers.project(Architecture(target)))
    return steps(gains, [(at + 1) / len(gains) for at in range(len(gains))])


def _traces(answer: TracesAnswer) -> str:
    rows = [
        (_short(r.name), {p: v / r.timeline.span for p, v in r.timeline.parts.items()})
        for r in answer.ranks
    ]
    detailed = [
        (rank, columns(strip(rank.timeline, SLICES), KIND_STYLES, rank.timeline.span))
        for rank in answer.ranks[:MOST_DETAILED]
    ]
    return _render(
        "traces.html",
        answer=answer,
        shares=stacked(rows, STYLES) if rows else Markup(""),
        detailed=detailed,
        most=MOST_KERNELS,
        parts=STYLES,
    )


def _render(template: str, **values: Any) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["times"] = lambda value: f"{value:.2f}×"
    environment.filters["ms"] = lambda value: f"{value * 1e3:,.3f} ms"
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    style = Markup(_read("page.css") + _read("workload.css"))
    page = environment.from_string(_read(template))
    return page.render(style=style, version=__version__, **values)


def _read(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")
