"""HTML page of a workload characterisation: one file with style sheet and plots inside."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from nostall import __version__
from nostall.core.files.atomic import write_text_atomically
from nostall.core.text.labels import kernel_labels, shorten_all
from nostall.core.text.plurals import pluralize
from nostall.report.workload.plots import Line, cdf_corners, line_plot, stacked_bars, timeline_plot
from nostall.workload import Architecture
from nostall.workload.characterization import JobsCharacterization, TracesCharacterization
from nostall.workload.characterization.jobs import RATE_FACTORS
from nostall.workload.characterization.kinds import KindsCharacterization
from nostall.workload.model import STEP_PARTS
from nostall.workload.timeline.analysis import TIME_PARTS
from nostall.workload.timeline.kernels import KernelTime
from nostall.workload.timeline.time_slices import slice_shares

SLICES = 320
"""Slices of a timeline plot."""
MAX_DETAILED_GPUS = 8
"""GPUs with a timeline and a kernel table; further GPUs are in the overview only."""
MAX_KERNELS = 20
MAX_JOBS = 15
MAX_KERNEL_LENGTH = 64
"""Characters of a kernel's name; the whole name is its tooltip."""
MAX_NAME_LENGTH = 28
MIN_JOBS = 10
"""Jobs from which a distribution is drawn; below, each job's bar or row says more."""

# CSS classes, defined in workload.css.
STEP_PART_STYLES = {
    "data": "c-data",
    "compute": "c-compute",
    "memory": "c-memory",
    "weights": "c-weights",
}
TIME_PART_STYLES = {part: f"c-{part}" for part in TIME_PARTS}
WORK_KIND_STYLES = ("c-compute", "c-memory", "c-weights", "c-data", "c-copies")


def write_page(
    result: JobsCharacterization | TracesCharacterization,
    path: Path,
    kinds: KindsCharacterization | None = None,
) -> Path:
    """Write the page of ``result``, with labels of its traces, to ``path``; returns ``path``."""
    if isinstance(result, JobsCharacterization):
        page = _jobs_page(result)
    else:
        page = _traces_page(result, kinds)
    write_text_atomically(path, page)
    return path


def _jobs_page(result: JobsCharacterization) -> str:
    population = result.population
    weights = population.weights("gpu")
    sensitivity = [
        Line(
            sweep.resource.value,
            f"l-{sweep.resource.value}",
            RATE_FACTORS,
            sweep.mean_speedups(weights),
        )
        for sweep in result.sweeps
    ]
    speedups = [
        Line(summary.target, f"l-{number}", *_speedup_cdf(result, summary.target))
        for number, summary in enumerate(result.porting)
        if summary.jobs >= MIN_JOBS
    ]
    largest = result.largest_jobs(MAX_JOBS)
    names = shorten_all([job.name for job, _ in largest], MAX_NAME_LENGTH)
    share_label = "modelled share of a step"
    return _render(
        "jobs.html",
        result=result,
        group_shares=stacked_bars(
            [(f"{g.name} ({pluralize(g.jobs, 'job')})", g.by_gpu) for g in result.groups],
            STEP_PART_STYLES,
        ),
        job_shares=stacked_bars(
            [
                (name, {part: step.share(part) for part in STEP_PARTS})
                for name, (_, step) in zip(names, largest, strict=True)
            ],
            STEP_PART_STYLES,
        ),
        by_job=line_plot(_share_cdfs(result, "job"), share_label, "jobs at or below", percent=True),
        by_gpu=line_plot(
            _share_cdfs(result, "gpu"), share_label, "GPU time at or below", percent=True
        ),
        sensitivity=line_plot(
            sensitivity, "factor of the rate", "modelled mean speed-up", log=True
        ),
        porting_speedups=line_plot(
            speedups,
            "modelled throughput speed-up",
            "jobs at or below",
            percent=True,
            log=True,
            mark=1.0,
        ),
        parts=STEP_PART_STYLES,
    )


def _share_cdfs(result: JobsCharacterization, by: str) -> list[Line]:
    """The distribution of the share of each part of the step over the jobs."""
    lines: list[Line] = []
    if len(result.population.jobs) < MIN_JOBS:
        return lines
    for part in STEP_PARTS:
        shares = result.population.distribution(
            lambda step, part=part: step.share(part),  # type: ignore[misc]
            by,
        )
        corners = cdf_corners(shares.values.tolist(), shares.cumulative.tolist())
        lines.append(Line(part, f"l-{part}", *corners))
    return lines


def _speedup_cdf(result: JobsCharacterization, target: str) -> tuple[list[float], list[float]]:
    """The distribution of the throughput speed-up of PS/Worker jobs ported to ``target``."""
    ps_workers = result.population.select(Architecture.PS_WORKER)
    assert ps_workers is not None
    speedups = sorted(p.throughput_speedup for p in ps_workers.project(Architecture(target)))
    return cdf_corners(speedups, [(i + 1) / len(speedups) for i in range(len(speedups))])


def _traces_page(result: TracesCharacterization, kinds: KindsCharacterization | None) -> str:
    names = shorten_all([gpu.name for gpu in result.gpus], MAX_NAME_LENGTH)
    rows = [
        (name, {part: value / gpu.timeline.span for part, value in gpu.timeline.parts.items()})
        for name, gpu in zip(names, result.gpus, strict=True)
    ]
    detailed = [
        (
            gpu,
            timeline_plot(slice_shares(gpu.timeline, SLICES), WORK_KIND_STYLES, gpu.timeline.span),
        )
        for gpu in result.gpus[:MAX_DETAILED_GPUS]
    ]
    return _render(
        "traces.html",
        result=result,
        gpu_shares=stacked_bars(rows, TIME_PART_STYLES) if rows else Markup(""),
        detailed=detailed,
        max_kernels=MAX_KERNELS,
        parts=TIME_PART_STYLES,
        kinds=kinds,
        reliability=_reliability(kinds) if kinds else Markup(""),
        chain=_chain(kinds) if kinds else Markup(""),
    )


def _reliability(kinds: KindsCharacterization) -> Markup:
    """Share of right labels over the probability, in cross-validation."""
    probabilities = [row[0] for row in kinds.reliability]
    rights = [row[1] for row in kinds.reliability]
    lines = [
        Line("calibrated", "l-0", [0.0, 1.0], [0.0, 1.0]),
        Line("labelled programs", "l-1", probabilities, rights),
    ]
    return line_plot(lines, "probability of the label", "right labels", percent=True)


def _chain(kinds: KindsCharacterization) -> Markup:
    """Topics and categories of the topic model's chain after each sweep."""
    if kinds.new_kinds is None:
        return Markup("")
    trace = kinds.new_kinds.model.trace_
    sweeps = [float(sweep + 1) for sweep in range(len(trace))]
    lines = [
        Line(name, f"l-{number}", sweeps, [row[name] for row in trace])
        for number, name in enumerate(("topics", "categories"))
    ]
    return line_plot(lines, "sweep after burn-in", "number")


def _labelled(kernels: Sequence[KernelTime]) -> list[tuple[KernelTime, str]]:
    """The kernels with names that fit into the table and tell them apart."""
    labels = kernel_labels([kernel.name for kernel in kernels], MAX_KERNEL_LENGTH)
    return list(zip(kernels, labels, strict=True))


def _unbroken(text: str) -> Markup:
    """The text with options of commands, which a browser would break after their hyphens, whole."""
    words = (
        Markup('<span class="option">{}</span>').format(word) if word.startswith("--") else word
        for word in text.split(" ")
    )
    return Markup(" ").join(words)


def _render(template: str, **values: Any) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["times"] = lambda value: f"{value:.2f}×"
    environment.filters["ms"] = lambda value: f"{value * 1e3:,.3f} ms"
    environment.filters["several"] = pluralize
    environment.filters["labelled"] = _labelled
    environment.filters["unbroken"] = _unbroken
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    style = Markup(_read_template("page.css") + _read_template("workload.css"))
    page = environment.from_string(_read_template(template))
    return page.render(style=style, version=__version__, **values)


def _read_template(name: str) -> str:
    return resources.files("nostall.report").joinpath("templates", name).read_text("utf-8")
