"""The schedule of a pipeline plan as one SVG: a row per worker, thin rows for the boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.files import write_atomically
from nostall.parallel.outcome import Outcome
from nostall.parallel.simulate.costs import Transfer
from nostall.report.plan.text import ranges, sentences, stage_table
from nostall.report.units import Scale, ticks

WIDTH, LEFT, RIGHT, TOP, ROW, LINK, FOOT = 1280, 190, 24, 34, 26, 13, 64
NAME = 30
"""Characters of a row's name."""
MOST_BARS = 20_000
"""Longer schedules are drawn up to here, and say so."""
_KINDS = {"forward": "#4c78a8", "backward": "#e07b39", "weight gradients": "#72a66a"}
_EDGE = ' stroke="white" stroke-width="0.3"'
"""Of bars that are wide enough to have something left inside."""
_LINKS = {"transfer": "#9d9d9d", "all-reduce": "#b279a2"}


def write_gantt(found: Outcome, path: Path) -> Path:
    """Write the figure as ``.svg``, or inside a page as ``.html``; returns the path.

    Raises :class:`BadInput` for another ending.
    """
    if path.suffix not in (".svg", ".html"):
        raise BadInput(f"--gantt {path}: the ending is {path.suffix!r}; allowed are .svg and .html")
    figure = gantt(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (_page(found, figure) if path.suffix == ".html" else figure).encode())
    return path


def _page(found: Outcome, figure: str) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    columns, rows = stage_table(found)
    first, *other = sentences(found)
    return environment.from_string(_read("plan.html")).render(
        style=Markup(_read("page.css")),
        title=f"{found.work.profile.name} on {found.work.cluster.name}",
        first=first,
        sentences=other,
        columns=columns,
        rows=rows,
        figure=Markup(figure),
    )


def _read(name: str) -> str:
    return files("nostall.report").joinpath("templates", name).read_text(encoding="utf-8")


def gantt(found: Outcome) -> str:
    """The figure; times are modelled and the figure says so."""
    workers = max(found.timeline.costs.worker) + 1
    height = TOP + ROW * workers + LINK * len(_transfers(found)) + FOOT
    title = (
        f"{found.planner}, {found.plan.policy}, {found.plan.split}: modelled "
        f"{Scale('s', found.timeline.iteration_s)(found.timeline.iteration_s)}, "
        f"{found.speedup:.3g}x one GPU"
    )
    bars = list(_bars(found, workers))
    shown = sorted(bars, key=lambda bar: bar[2])[:MOST_BARS]
    cut = f" (first {MOST_BARS} of {len(bars)} bars)" if len(bars) > MOST_BARS else ""
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="sans-serif" font-size="11" aria-label="{escape(title)}">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f'<text x="8" y="18" font-size="13">{escape(title + cut)}</text>',
            *_axis(found, height),
            *_names(found, workers),
            *(_draw(found, *bar) for bar in shown),
            "</svg>\n",
        ]
    )


Floats = NDArray[np.float64]
_Bar = tuple[float, float, float, float, str, str]
"""Top, height, start, seconds, colour, text."""


def _bars(found: Outcome, workers: int) -> Iterator[_Bar]:
    timeline = found.timeline
    for kind, (name, colour) in enumerate(_KINDS.items()):
        for s in range(len(found.plan.stages)):
            top = TOP + ROW * timeline.costs.worker[s]
            seconds = float(timeline.durations[kind, s])
            for m, start in enumerate(timeline.starts[kind, s]):
                if start >= 0:
                    text = f"{name} of micro-batch {m}, stage {s}"
                    yield top, ROW - 3, float(start), seconds, colour, text
    for lane, (text, transfer, starts) in enumerate(_transfers(found)):
        top = TOP + ROW * workers + LINK * lane
        colour = _LINKS["all-reduce" if text.startswith("all-reduce") else "transfer"]
        for start in starts:
            if start >= 0:
                yield top, LINK - 4, float(start), transfer.seconds, colour, text


def _transfers(found: Outcome) -> list[tuple[str, Transfer, Floats]]:
    """Name and starts of each boundary's direction and of each all-reduce that takes time."""
    costs, stages = found.timeline.costs, range(len(found.plan.stages))
    names = [f"{s} to {s + 1}" for s in stages[:-1]] + [f"{s + 1} to {s}" for s in stages[:-1]]
    names += [f"all-reduce {s}" for s in stages]
    every = zip(
        names, (*costs.onward, *costs.back, *costs.allreduce), found.timeline.sent, strict=True
    )
    return [(name, transfer, sent) for name, transfer, sent in every if transfer.seconds > 0]


def _draw(
    found: Outcome, top: float, height: float, start: float, seconds: float, colour: str, text: str
) -> str:
    per_second = (WIDTH - LEFT - RIGHT) / found.timeline.iteration_s
    left, width = LEFT + start * per_second, max(0.4, seconds * per_second)
    return (
        f'<rect x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="{colour}"{_EDGE if width > 2 else ""}><title>{text}</title></rect>'
    )


def _names(found: Outcome, workers: int) -> Iterator[str]:
    stages = found.plan.stages
    for w in range(workers):
        mine = [s for s, worker in enumerate(found.timeline.costs.worker) if worker == w]
        gpus = stages[mine[0]].gpus
        text = f"stage {ranges(mine)}: GPU{'s' if len(gpus) > 1 else ''} {ranges(gpus)}"
        yield f'<text x="8" y="{TOP + ROW * w + 16}">{_short(text)}</text>'
    for lane, (text, _, _) in enumerate(_transfers(found)):
        y = TOP + ROW * workers + LINK * lane + LINK - 4
        where = f'x="{LEFT - 8}" y="{y}"'
        yield f'<text {where} font-size="9" text-anchor="end" fill="#666">{text}</text>'


def _short(text: str) -> str:
    return escape(text if len(text) <= NAME else f"{text[: NAME - 1]}…")


def _axis(found: Outcome, height: int) -> Iterator[str]:
    end = found.timeline.iteration_s
    scale = Scale("s", end)
    for time in ticks(0.0, end, 8):
        x = LEFT + (WIDTH - LEFT - RIGHT) * time / end
        yield f'<path d="M{x:.1f} {TOP - 4}V{height - 54}" stroke="#e3e3e3"/>'
        yield f'<text x="{x:.1f}" y="{height - 40}" text-anchor="middle">{scale(time)}</text>'
    kinds = dict(_KINDS)
    if not found.timeline.split:
        del kinds["weight gradients"]
    for i, (name, colour) in enumerate((kinds | _LINKS).items()):
        x = LEFT + 150 * i
        yield f'<rect x="{x}" y="{height - 26}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{height - 16}">{name}</text>'
