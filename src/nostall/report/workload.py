"""HTML pages of ``nostall characterize``: one file with inline SVG that needs no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from nostall.core.files.atomic import write_text_atomically
from nostall.core.text.labels import kernel_labels, shorten_all
from nostall.core.text.plurals import pluralize
from nostall.report.html import render, svg_tag, svg_text
from nostall.report.units import ticks
from nostall.workload import Architecture
from nostall.workload.characterization import JobsCharacterization, TracesCharacterization
from nostall.workload.characterization.jobs import RATE_FACTORS
from nostall.workload.characterization.kinds import KindsCharacterization
from nostall.workload.model.breakdown import STEP_PARTS
from nostall.workload.timeline.analysis import TIME_PARTS, slice_shares
from nostall.workload.timeline.kernels import KernelTime

# Pixels.
LINE_PLOT_WIDTH, LINE_PLOT_HEIGHT = 620, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 42
WIDE_PLOT_WIDTH = 1280
TIMELINE_HEIGHT = 120
MAX_POINTS = 400
"""Points per line; longer lines are sampled evenly."""
MIN_SHARE = 5e-5
"""Least share of a bar that is drawn."""
MIN_NUMBER, MIN_NARROW_NUMBER = 0.04, 0.1
"""Least shares with a number, on wide and on narrow screens."""


@dataclass(frozen=True)
class Line:
    """One line of a plot."""

    name: str
    style: str
    """CSS class."""
    x: Sequence[float]
    y: Sequence[float]


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], styles: Mapping[str, str]
) -> Markup:
    """One horizontal bar per row, divided into shares that sum to 1.

    ``styles`` maps each part to its CSS class, in the order of the bar.  The bars are elements of
    the page, so that they are as wide as the screen and their texts keep their size.
    """
    parts = []
    for name, shares in rows:
        bar = "".join(
            _share(name, part, shares[part], style)
            for part, style in styles.items()
            if shares.get(part, 0.0) >= MIN_SHARE
        )
        parts.append(
            f'<div class="share"><span class="name">{escape(name)}</span>'
            f'<span class="track">{bar}</span></div>'
        )
    return Markup("".join(parts))


def _share(name: str, part: str, share: float, style: str) -> str:
    """One part of a bar; its number is left out where it has no room."""
    title = escape(f"{name}: {part.replace('_', ' ')} {share:.1%}")
    small = " small" if share < MIN_NARROW_NUMBER else ""
    number = f"{share:.0%}" if share >= MIN_NUMBER else ""
    return f'<i class="{style}{small}" style="width:{share:.3%}" title="{title}">{number}</i>'


def used_styles(
    rows: Sequence[tuple[str, Mapping[str, float]]], styles: Mapping[str, str]
) -> dict[str, str]:
    """The styles of the parts that some bar shows."""
    return {
        part: style
        for part, style in styles.items()
        if any(shares.get(part, 0.0) >= MIN_SHARE for _, shares in rows)
    }


def line_plot(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    log: bool = False,
    mark: float | None = None,
) -> Markup:
    """Lines over common axes: ``log`` for a logarithmic x axis, ``percent`` for shares as y.

    The x axis contains ``mark``, with a line there.
    """
    lines = [line for line in lines if len(line.x)]
    if not lines:
        return Markup("")
    axes = _Axes(lines, percent, log, mark)
    svg = [
        svg_tag(LINE_PLOT_WIDTH, LINE_PLOT_HEIGHT, f"{y_label} over {x_label}"),
        *_draw_axes(axes, x_label, y_label),
    ]
    if mark is not None:
        bottom = LINE_PLOT_HEIGHT - BOTTOM
        svg.append(f'<path class="mark" d="M{axes.x(mark)} {TOP}V{bottom}"/>')
    for line in lines:
        drawn = np.unique(np.linspace(0, len(line.x) - 1, MAX_POINTS).astype(int))
        points = " ".join(f"{axes.x(line.x[i])},{axes.y(line.y[i])}" for i in drawn)
        title = f"<title>{escape(line.name)}</title>"
        svg.append(f'<polyline class="line {line.style}" points="{points}">{title}</polyline>')
    return Markup("".join([*svg, "</svg>"]))


def timeline_plot(shares: np.ndarray, styles: Sequence[str], seconds: float) -> Markup:
    """Stacked areas over time: the share of each kind of work in each slice.

    ``shares`` has the shape [kinds, slices]; ``styles`` are the CSS classes of the kinds;
    ``seconds`` is the length of the timeline.
    """
    height = TIMELINE_HEIGHT
    step = WIDE_PLOT_WIDTH / shares.shape[1]
    svg = [svg_tag(WIDE_PLOT_WIDTH, height + 24, "work of the GPU over time")]
    base = np.zeros(shares.shape[1])
    for row, style in zip(shares, styles, strict=True):
        top = np.minimum(base + row, 1.0)
        path = "".join(
            f"M{i * step:.1f} {height * (1 - low):.1f}V{height * (1 - high):.1f}h{step:.2f}"
            f"V{height * (1 - low):.1f}z"
            for i, (low, high) in enumerate(zip(base, top, strict=True))
            if high - low > 0.004
        )
        svg.append(f'<path class="{style}" d="{path}"/>')
        base = top
    svg.append(f'<path class="grid" d="M0 {height}H{WIDE_PLOT_WIDTH}"/>')
    for tick in ticks(0.0, seconds * 1e3, 8):
        x = min(max(WIDE_PLOT_WIDTH * tick / (seconds * 1e3), 26), WIDE_PLOT_WIDTH - 30)
        svg.append(svg_text(x, height + 16, f"{tick:.6g} ms", "middle", "tick"))
    return Markup("".join([*svg, "</svg>"]))


def cdf_corners(
    values: Sequence[float], cumulative: Sequence[float]
) -> tuple[list[float], list[float]]:
    """(x, y) of the corners of a cumulative distribution: it rises at each value.

    ``cumulative`` is the share at or below each value.
    """
    drawn = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS // 2).astype(int))
    x, y, below = [], [], 0.0
    for i in drawn:
        x += [values[i], values[i]]
        y += [below, cumulative[i]]
        below = cumulative[i]
    return x, y


class _Axes:
    """Ranges of the axes of a line plot, and the mapping from values to pixels."""

    def __init__(
        self, lines: Sequence[Line], percent: bool, log: bool, mark: float | None = None
    ) -> None:
        xs = [v for line in lines for v in (min(line.x), max(line.x))]
        xs += [] if mark is None else [mark]
        ys = [v for line in lines for v in (min(line.y), max(line.y))]
        self.percent, self.log = percent, log
        self.left, self.right = self._scaled(min(xs)), self._scaled(max(xs))
        if self.right <= self.left:
            self.right = self.left + 1.0
        self.bottom, self.top = (0.0, 1.0) if percent else (min(0.0, *ys), max(ys) * 1.05 or 1.0)

    def _scaled(self, x: float) -> float:
        return math.log10(x) if self.log else x

    def x(self, value: float) -> float:
        share = (self._scaled(value) - self.left) / (self.right - self.left)
        return round(LEFT + share * (LINE_PLOT_WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return round(LINE_PLOT_HEIGHT - BOTTOM - share * (LINE_PLOT_HEIGHT - TOP - BOTTOM), 1)

    def x_ticks(self) -> list[tuple[float, str]]:
        """(value, label) of the ticks of the x axis."""
        if not self.log:
            return [(t, f"{t:.6g}") for t in ticks(self.left, self.right, 6)]
        mantissas = (1,) if self.right - self.left > 2 else (1, 2, 5)
        exponents = range(math.floor(self.left), math.ceil(self.right) + 1)
        candidates = [m * 10.0**e for e in exponents for m in mantissas]
        values = [v for v in candidates if self.left - 1e-9 <= math.log10(v) <= self.right + 1e-9]
        if len(values) < 2:  # the axis is too short for 1, 2, 5
            values = ticks(10**self.left, 10**self.right, 5)
        stride = max(1, len(values) // 7)
        return [(v, f"{v:.4g}") for v in values[::stride]]


def _draw_axes(axes: _Axes, x_label: str, y_label: str) -> list[str]:
    right, bottom = LINE_PLOT_WIDTH - RIGHT, LINE_PLOT_HEIGHT - BOTTOM
    svg = []
    for tick in ticks(axes.bottom, axes.top):
        y = axes.y(tick)
        label = f"{tick:.0%}" if axes.percent else f"{tick:.4g}"
        svg.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        svg.append(svg_text(LEFT - 8, y + 4, label, "end", "tick"))
    for value, label in axes.x_ticks():
        x = axes.x(value)
        svg.append(f'<path class="grid" d="M{x} {bottom}v5"/>')
        svg.append(svg_text(x, bottom + 18, label, "middle", "tick"))
    middle = (TOP + bottom) / 2
    svg.append(svg_text((LEFT + right) / 2, LINE_PLOT_HEIGHT - 6, x_label, "middle", "axis"))
    svg.append(
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return svg


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
STEP_PART_STYLES = {part: f"c-{part}" for part in STEP_PARTS}
ARCHITECTURE_WORDS = {
    Architecture.SINGLE: "one worker with one GPU",
    Architecture.MULTI_GPU: "one worker with several GPUs, weights in host memory",
    Architecture.PS_WORKER: "parameter servers, one GPU a worker",
    Architecture.ALLREDUCE_LOCAL: "all-reduce in one server",
    Architecture.ALLREDUCE_CLUSTER: "all-reduce over several servers",
    Architecture.PEARL: "embeddings divided, other weights replicated, in one server",
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
    return render(
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
        lead=_jobs_lead(result),
        architectures=_architectures(result),
    )


def _jobs_lead(result: JobsCharacterization) -> str:
    """The answer of the page in a sentence: what bounds the jobs, and whether porting helps."""
    bounds = [f"{name} bounds {share:.0%}" for name, share in result.resource_ranking.items()]
    lead = f"{' and '.join(bounds[:2]) or 'Nothing bounds any'} of the GPU time"
    for porting in result.porting[:1]:
        some = f"{porting.faster:.0%}" if porting.faster else "none"
        lead += f"; {some} of the PS/Worker jobs would be faster as {porting.target}"
    return f"{lead[0].upper()}{lead[1:]}."


def _architectures(result: JobsCharacterization) -> str:
    """What the names of the architectures on the page mean."""
    named = {g.name for g in result.groups} | {p.target for p in result.porting}
    return "; ".join(
        f"{architecture}: {words}"
        for architecture, words in ARCHITECTURE_WORDS.items()
        if architecture in named
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
    return render(
        "traces.html",
        labelled=_labelled,
        unbroken=_unbroken,
        result=result,
        gpu_shares=stacked_bars(rows, TIME_PART_STYLES) if rows else Markup(""),
        detailed=detailed,
        max_kernels=MAX_KERNELS,
        parts=used_styles(rows, TIME_PART_STYLES),
        lead=_traces_lead(result),
        kinds=kinds,
        reliability=_reliability(kinds) if kinds else Markup(""),
        chain=_chain(kinds) if kinds else Markup(""),
    )


def _traces_lead(result: TracesCharacterization) -> str:
    """The answer of the page in a sentence: what to fix first, and what that gains at most."""
    if not result.gpus or not result.gpus[0].bottlenecks:
        return ""
    gpu, first = result.gpus[0], result.gpus[0].bottlenecks[0]
    where = f" (of {gpu.name})" if len(result.gpus) > 1 else ""
    lead = f"Fix first: {first.problem}, {1e3 * first.seconds:,.1f} of "
    lead += f"{1e3 * gpu.timeline.span:,.1f} ms{where}"
    if first.max_speedup:
        lead += f"; once fixed, at most {first.max_speedup:.2f}× as fast (modelled)"
    return f"{lead}. Try: {first.remedy}"


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
