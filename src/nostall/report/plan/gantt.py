"""Gantt chart of a plan's schedule as SVG: one row per worker, and thin rows for transfers."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.parallel.evaluation import PlanEvaluation
from nostall.parallel.simulate.costs import Transfer
from nostall.report.html import render
from nostall.report.plan.summary import (
    cards,
    exposed_allreduce,
    lead,
    ranges,
    reading,
    sentences,
    stage_table,
)
from nostall.report.units import Scale, ticks

WIDTH, LEFT, RIGHT, TOP, ROW, TRANSFER_ROW, FOOT = 1280, 190, 24, 34, 26, 13, 64
"""Sizes in pixels: the figure, its margins, and the heights of rows."""
MAX_NAME = 30
"""Characters of a row's name."""
MAX_BARS = 20_000
"""A longer schedule is drawn up to this many bars; the title states that."""
_KIND_COLOURS = {"forward": "#4c78a8", "backward": "#e07b39", "weight gradients": "#72a66a"}
_TRANSFER_COLOURS = {"transfer": "#9d9d9d", "all-reduce": "#b279a2"}
_STYLE = (
    ":root{--gantt-paper:#fff;--gantt-ink:#1b2430;--gantt-soft:#5d6b7c;--gantt-line:#e3e3e3}"
    "@media(prefers-color-scheme:dark){:root{--gantt-paper:#171d25;--gantt-ink:#dfe6ee;"
    "--gantt-soft:#93a1b1;--gantt-line:#2a333e}}"
    ".paper{fill:var(--gantt-paper)}.gantt text{fill:var(--gantt-ink)}"
    ".gantt .soft{fill:var(--gantt-soft)}.gantt .grid{stroke:var(--gantt-line)}"
)
"""Colours of the paper and of texts, which follow the dark mode of the reader."""
_EDGE = ' stroke="white" stroke-width="0.3"'
"""Outline of bars that are wide enough for it."""

Floats = NDArray[np.float64]


class _Bar(NamedTuple):
    """A bar of the chart: an operation or a transfer."""

    top: float
    """Pixels."""
    height: float
    """Pixels."""
    start_s: float
    seconds: float
    colour: str
    text: str
    """Tooltip."""


def write_gantt(
    evaluation: PlanEvaluation,
    path: Path,
    beside: PlanEvaluation | None = None,
    launch: str = "",
) -> Path:
    """Write the chart as ``.svg``, or within a page as ``.html``; returns the path.

    The page compares the plan with ``beside``, which is data parallelism; ``launch`` is the command
    that runs it, empty if it cannot be run.
    Raises :class:`BadInput` if the file name has another extension.
    """
    if path.suffix not in (".svg", ".html"):
        raise BadInput(
            f"--gantt {path}: the extension is {path.suffix!r}; allowed are .svg and .html"
        )
    figure = gantt(evaluation)
    text = _page(evaluation, figure, beside, launch) if path.suffix == ".html" else figure
    write_text_atomically(path, text, parents=True)
    return path


def _page(
    evaluation: PlanEvaluation, figure: str, beside: PlanEvaluation | None, launch: str
) -> str:
    first, *further = sentences(evaluation)
    reason = "Runs the plan, and measures what this page models."
    if "--module" in launch:
        reason += " The module is the one that was profiled."
    note = (
        "one iteration; the empty parts of a stage are the bubble, "
        f"{1 - evaluation.utilization:.0%} of the GPUs' time; hover over a bar for its operation"
    )
    return plan_page(
        title=f"{evaluation.workload.profile.name} on {evaluation.workload.cluster.name}",
        lead=lead(evaluation, beside),
        cards=cards(evaluation, beside),
        next_command=launch,
        next_reason=reason,
        first=f"Planner {first}. {reading(evaluation)}",
        figure_name="Schedule",
        figure_note=note,
        tables=[
            ("Stages", "times per micro-batch; all-reduce per iteration",
             *stage_table(evaluation), 3)
        ],
        sentences=[*(exposed_allreduce(beside) if beside else []), *further],
        figure=Markup(figure),
    )  # fmt: skip


def plan_page(**values: Any) -> str:
    """The page of a plan: its headlines, its picture, tables and sentences."""
    return render("plan.html", styles=("page.css",), **values)


def gantt(evaluation: PlanEvaluation) -> str:
    """The chart as SVG text; its title states that the times are modelled."""
    iteration_s = evaluation.timeline.iteration_s
    workers = max(evaluation.timeline.costs.worker) + 1
    height = TOP + ROW * workers + TRANSFER_ROW * len(_transfers(evaluation)) + FOOT
    title = (
        f"{evaluation.planner}, {evaluation.plan.policy}, {evaluation.plan.split}: modelled "
        f"{Scale('s', iteration_s)(iteration_s)}, {evaluation.speedup:.3g}x one GPU"
    )
    bars = list(_bars(evaluation, workers))
    shown = sorted(bars, key=lambda bar: bar.start_s)[:MAX_BARS]
    limit = f" (first {MAX_BARS} of {len(bars)} bars)" if len(bars) > MAX_BARS else ""
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'class="gantt" role="img" font-family="sans-serif" font-size="11" '
            f'aria-label="{escape(title)}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            f'<text x="8" y="18" font-size="13">{escape(title + limit)}</text>',
            *_time_axis(iteration_s, height),
            *_legend(evaluation, height),
            *_row_names(evaluation, workers),
            *(_draw(bar, iteration_s) for bar in shown),
            "</svg>\n",
        ]
    )


def _bars(evaluation: PlanEvaluation, workers: int) -> Iterator[_Bar]:
    timeline = evaluation.timeline
    for kind, (name, colour) in enumerate(_KIND_COLOURS.items()):
        for s in range(len(evaluation.plan.stages)):
            top = TOP + ROW * timeline.costs.worker[s]
            seconds = float(timeline.durations[kind, s])
            for m, start in enumerate(timeline.operation_starts[kind, s]):
                if start >= 0:
                    text = f"{name} of micro-batch {m}, stage {s}"
                    yield _Bar(top, ROW - 3, float(start), seconds, colour, text)
    for row, (name, transfer, starts) in enumerate(_transfers(evaluation)):
        top = TOP + ROW * workers + TRANSFER_ROW * row
        is_allreduce = name.startswith("all-reduce")
        colour = _TRANSFER_COLOURS["all-reduce" if is_allreduce else "transfer"]
        for start in starts:
            if start >= 0:
                height = TRANSFER_ROW - 4
                yield _Bar(top, height, float(start), transfer.seconds, colour, name)


def _transfers(evaluation: PlanEvaluation) -> list[tuple[str, Transfer, Floats]]:
    """Name, cost and starts of each direction of a boundary and each all-reduce that takes time."""
    timeline, stages = evaluation.timeline, range(len(evaluation.plan.stages))
    costs = timeline.costs
    names = [f"{s} to {s + 1}" for s in stages[:-1]] + [f"{s + 1} to {s}" for s in stages[:-1]]
    names += [f"all-reduce {s}" for s in stages]
    transfers = (*costs.forward_transfers, *costs.backward_transfers, *costs.allreduce)
    rows = zip(names, transfers, timeline.transfer_starts, strict=True)
    return [row for row in rows if row[1].seconds > 0]


def _draw(bar: _Bar, iteration_s: float) -> str:
    pixels_per_s = (WIDTH - LEFT - RIGHT) / iteration_s
    left, width = LEFT + bar.start_s * pixels_per_s, max(0.4, bar.seconds * pixels_per_s)
    edge = _EDGE if width > 2 else ""
    return (
        f'<rect x="{left:.2f}" y="{bar.top:g}" width="{width:.2f}" height="{bar.height:g}" '
        f'fill="{bar.colour}"{edge}><title>{bar.text}</title></rect>'
    )


def _row_names(evaluation: PlanEvaluation, workers: int) -> Iterator[str]:
    stages = evaluation.plan.stages
    for w in range(workers):
        worker_stages = [s for s, v in enumerate(evaluation.timeline.costs.worker) if v == w]
        gpus = stages[worker_stages[0]].gpus
        name = f"stage {ranges(worker_stages)}: GPU{'s' if len(gpus) > 1 else ''} {ranges(gpus)}"
        yield f'<text x="8" y="{TOP + ROW * w + 16}">{_shorten(name)}</text>'
    for row, (name, _, _) in enumerate(_transfers(evaluation)):
        y = TOP + ROW * workers + TRANSFER_ROW * row + TRANSFER_ROW - 4
        position = f'x="{LEFT - 8}" y="{y}"'
        yield f'<text {position} font-size="9" text-anchor="end" class="soft">{name}</text>'


def _shorten(name: str) -> str:
    return escape(name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…")


def _time_axis(iteration_s: float, height: int) -> Iterator[str]:
    scale = Scale("s", iteration_s)
    for time in ticks(0.0, iteration_s, 8):
        x = LEFT + (WIDTH - LEFT - RIGHT) * time / iteration_s
        yield f'<path d="M{x:.1f} {TOP - 4}V{height - 54}" class="grid"/>'
        yield f'<text x="{x:.1f}" y="{height - 40}" text-anchor="middle">{scale(time)}</text>'


def _legend(evaluation: PlanEvaluation, height: int) -> Iterator[str]:
    colours = _KIND_COLOURS | _TRANSFER_COLOURS
    if not evaluation.timeline.splits_backward:
        del colours["weight gradients"]
    for i, (name, colour) in enumerate(colours.items()):
        x = LEFT + 150 * i
        yield f'<rect x="{x}" y="{height - 26}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{height - 16}">{name}</text>'
