"""Learning curves as one SVG: a panel for each kernel, with median and quartiles over the seeds.

The evaluations are on a logarithmic axis. The SVG is written without a plotting library, so that
the same data give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log2
from typing import Any

from nostall.report.units import ticks

COLOURS = {
    "anneal": "#0072b2",
    "sip": "#56b4e9",
    "random": "#888888",
    "cuasmrl": "#e69f00",
    "ppo": "#d55e00",
    "ppo-trained": "#009e73",
}
"""Colour-blind safe palette of Okabe and Ito."""

COLUMNS = 3
WIDTH, HEIGHT = 330, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 40
LEGEND = 34
FIRST = 8
"""Evaluations at the left edge of a panel."""

_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#444}.title{font-weight:600;fill:#111}"
    ".grid{stroke:#ddd;fill:none}.line{fill:none;stroke-width:1.8}.band{stroke:none;opacity:.16}"
    ".paper{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#b4bcc6}.title{fill:#eee}"
    ".grid{stroke:#3a4048}.paper{fill:#131416}}"
)


def figure(rows: Sequence[Mapping[str, Any]], evaluations: int) -> str:
    """SVG text with the curves of the rows of ``summary.summary``, one panel for each kernel."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    width, height = COLUMNS * WIDTH, LEGEND + ceil(len(kernels) / COLUMNS) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="modelled gain over evaluations, by kernel and strategy">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" class="paper"/>',
        f'<text x="{width - RIGHT}" y="24" text-anchor="end">modelled gain: median, quartiles'
        "</text>",
        *_legend([s for s in COLOURS if any(row["strategy"] == s for row in rows)]),
    ]
    for number, kernel in enumerate(kernels):
        x, y = number % COLUMNS * WIDTH, LEGEND + number // COLUMNS * HEIGHT
        kernel_rows = [row for row in rows if row["kernel"] == kernel]
        panel = "".join(_panel(kernel, kernel_rows, evaluations))
        parts.append(f'<g transform="translate({x} {y})">{panel}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Frame:
    """Maps (evaluations, ratio) to coordinates in a panel; the y axis is the gain in per cent."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], evaluations: int) -> None:
        self.evaluations = max(2 * FIRST, evaluations)
        self.high = max(0.1, 105 * max(at[3] - 1 for row in rows for at in row["curve"]))

    def x(self, evaluations: float) -> float:
        share = log2(max(FIRST, evaluations) / FIRST) / log2(self.evaluations / FIRST)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, ratio: float) -> float:
        share = 100 * (ratio - 1) / self.high
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _legend(strategies: Sequence[str]) -> Iterator[str]:
    for number, strategy in enumerate(strategies):
        x = LEFT + 120 * number
        yield f'<path class="line" stroke="{COLOURS[strategy]}" d="M{x} 20h22"/>'
        yield f'<text x="{x + 28}" y="24">{strategy}</text>'


def _panel(kernel: str, rows: Sequence[Mapping[str, Any]], evaluations: int) -> Iterator[str]:
    frame, bottom = _Frame(rows, evaluations), HEIGHT - BOTTOM
    yield f'<text class="title" x="{LEFT}" y="{TOP - 12}">{kernel}</text>'
    for tick in ticks(0, frame.high, 4):
        y = frame.y(1 + tick / 100)
        yield f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g} %</text>'
    at = FIRST
    while at <= frame.evaluations:
        x = frame.x(at)
        yield f'<path class="grid" d="M{x} {bottom}v4"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{at}</text>'
        at *= 4
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">evaluations</text>'
    for strategy in COLOURS:
        for row in rows:
            if row["strategy"] == strategy:
                yield from _curve(row["curve"], frame, COLOURS[strategy])


def _curve(curve: Sequence[Sequence[float]], frame: _Frame, colour: str) -> Iterator[str]:
    """The median as a line, over a band between the quartiles."""
    low, median, high = (_corners(curve, frame, column) for column in (1, 2, 3))
    yield f'<path class="band" fill="{colour}" d="M{"L".join([*low, *reversed(high)])}Z"/>'
    yield f'<path class="line" stroke="{colour}" d="M{"L".join(median)}"/>'


def _corners(curve: Sequence[Sequence[float]], frame: _Frame, column: int) -> list[str]:
    """Corners of a step function: a gain holds from its evaluation on."""
    points, y = [], frame.y(1.0)
    for at in curve:
        x = frame.x(at[0])
        points += [f"{x} {y}", f"{x} {frame.y(at[column])}"]
        y = frame.y(at[column])
    return [*points, f"{frame.x(frame.evaluations)} {y}"]
