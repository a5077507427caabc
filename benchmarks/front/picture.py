"""The pictures of README, start page and result pages: a dot for each value, on one axis.

``python -m benchmarks page readme`` writes it for light and for dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.front.headline import Headline
from benchmarks.harness.result_file import ROOT

FOLDER = ROOT.parent / "docs" / "pictures"
WIDTH, LEFT, RIGHT, TOP, ROW, FOOT = 880, 366, 24, 34, 34, 40
"""Pixels: the picture, its margins, the height of a row."""
LABEL, NUMBER = LEFT - 92, LEFT - 14
"""Right ends of labels and numbers: both are in view where a narrow page scrolls the picture."""
RADIUS = 3.4
SLOWER = 0.995
"""Ratios below this one have the colour of a loss."""


@dataclass(frozen=True)
class Colours:
    """Colours of one picture; contrast of texts to the paper is at least 4.5."""

    paper: str
    ink: str
    soft: str
    line: str
    gain: str
    loss: str


@dataclass(frozen=True)
class Axis:
    """The axis of a picture, with the words at its ends."""

    ticks: tuple[float, ...]
    """Labelled values; the first and the last are the ends."""
    note: str
    """What the values are; below the axis."""
    head: str = "mean"
    """Head of the column of numbers."""
    suffix: str = "×"
    line: float | None = 1.0
    """Value with a heavy line."""
    less: str = ""
    """Words on the left of the heavy line."""
    more: str = ""
    """Words on its right."""
    logarithmic: bool = True
    loses_below: float = 0.0
    """Values below this one have the colour of a loss."""

    def x(self, value: float) -> float:
        """The pixel of a value; those beyond the ends stand at the ends."""
        low, high = self.ticks[0], self.ticks[-1]
        inside = min(max(value, low), high)
        if self.logarithmic:
            share = math.log(inside / low) / math.log(high / low)
        else:
            share = (inside - low) / (high - low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


@dataclass(frozen=True)
class Series:
    """One row: its values, the value of the heavy mark, and the number beside the label."""

    label: str
    values: tuple[float, ...]
    mark: float
    text: str
    count: bool = True
    """Whether the number of values stands behind the label."""


GAINS = Axis(
    (0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0), "time of the baseline / time with nostall, measured",
    less="← slower", more="nostall is faster →", loses_below=SLOWER,
)  # fmt: skip
THEMES = {
    "light": Colours("#ffffff", "#1b2430", "#57606a", "#d8dee4", "#1f6feb", "#bc4c00"),
    "dark": Colours("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#58a6ff", "#f0883e"),
}


def gain_series(headline: Headline) -> Series:
    """The row of a headline."""
    return Series(
        headline.label, headline.ratios, headline.mean, f"{headline.mean:.{headline.digits}f}×"
    )


def draw(title: str, rows: Sequence[Series], axis: Axis, colours: Colours) -> str:
    """The SVG text."""
    height = TOP + ROW * len(rows) + FOOT
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" font-family="-apple-system, '
            '\'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" '
            f'aria-label="{escape(title, {chr(34): "&quot;"})}">\n',
            f'<rect width="{WIDTH}" height="{height}" fill="{colours.paper}"/>\n',
            *_axis(height, axis, colours),
            *(line for number, row in enumerate(rows) for line in _row(number, row, axis, colours)),
            "</svg>\n",
        ]
    )


def picture_name(page: str, theme: str) -> str:
    """File name of a result page's picture; an empty page is README."""
    part = f"-{page.removesuffix('.md')}" if page else ""
    return f"gains{part}-{theme}.svg"


def picture_text(page: str, alternative: str) -> str:
    """The Markdown of a result page's picture in both themes."""
    images = [
        f"```{{image}} ../pictures/{picture_name(page, theme)}\n"
        f":alt: {alternative}\n:class: only-{theme}\n```"
        for theme in THEMES
    ]
    return "\n\n".join(["::::{container} scroll", *images, "::::"])


def pictures(headlines: Sequence[Headline]) -> dict[str, str]:
    """File name -> SVG text: one picture of all headlines, and one for each result page."""
    pages = {"": list(headlines)}
    for headline in headlines:
        pages.setdefault(headline.page, []).append(headline)
    begin = "Measured gains of nostall beside the strongest baseline: "
    return {
        picture_name(page, theme): draw(
            begin + "; ".join(f"{h.label} {h.mean:.2f}" for h in shown),
            list(map(gain_series, shown)), GAINS, colours,
        )
        for page, shown in pages.items()
        for theme, colours in THEMES.items()
    }  # fmt: skip


def _axis(height: int, axis: Axis, colours: Colours) -> Iterator[str]:
    bottom = height - FOOT
    digits = max(len(f"{tick:g}".partition(".")[2]) for tick in axis.ticks)
    for tick in axis.ticks:
        x, is_line = axis.x(tick), tick == axis.line
        colour, width = (colours.ink, 2.5) if is_line else (colours.line, 1)
        yield f'<path d="M{x} {TOP - 8}V{bottom}" stroke="{colour}" stroke-width="{width}"/>\n'
        weight = ' font-weight="700"' if is_line else ""
        yield (
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="{colours.soft}"'
            f"{weight}>{tick:.{digits}f}{axis.suffix}</text>\n"
        )
    if axis.line is not None:
        x = axis.x(axis.line)
        yield (
            f'<text x="{x + 10}" y="{TOP - 16}" fill="{colours.soft}">{axis.more}</text>'
            f'<text x="{x - 10}" y="{TOP - 16}" text-anchor="end" fill="{colours.soft}">'
            f"{axis.less}</text>\n"
        )
    yield (
        f'<text x="{NUMBER}" y="{TOP - 16}" text-anchor="end" fill="{colours.soft}">'
        f"{axis.head}</text>"
        f'<text x="{LEFT}" y="{height - 4}" fill="{colours.soft}">{axis.note}</text>\n'
    )


def _row(number: int, row: Series, axis: Axis, colours: Colours) -> Iterator[str]:
    middle = TOP + ROW * number + ROW / 2
    count = f' <tspan fill="{colours.soft}">({len(row.values)})</tspan>' if row.count else ""
    yield (
        f'<text x="{LABEL}" y="{middle + 4}" text-anchor="end" fill="{colours.ink}">'
        f"{escape(row.label)}{count}</text>\n"
    )
    for at, value in _spread(row.values):
        colour = colours.loss if value < axis.loses_below else colours.gain
        yield (
            f'<circle cx="{axis.x(value)}" cy="{middle + at:.1f}" r="{RADIUS}" fill="{colour}" '
            'fill-opacity=".45"/>\n'
        )
    x = axis.x(row.mark)
    yield f'<path d="M{x} {middle - 13}V{middle + 13}" stroke="{colours.ink}" stroke-width="3"/>\n'
    yield (
        f'<text x="{NUMBER}" y="{middle + 4}" text-anchor="end" font-weight="700" '
        f'fill="{colours.ink}">{row.text}</text>\n'
    )


def _spread(ratios: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each ratio with a distance from the middle of its row, so that equal ones show as many."""
    for number, ratio in enumerate(sorted(ratios)):
        # Multiples of the golden ratio: neighbours are far apart, and no random seed is needed.
        yield 18 * ((number * 0.618034) % 1 - 0.5), ratio
