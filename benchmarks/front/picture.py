"""The pictures of README, start page and result pages: a dot for each value, on one axis.

``python -m benchmarks page readme`` writes it for light and for dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from xml.sax.saxutils import escape

from benchmarks.front.headline import Headline
from benchmarks.harness.result_file import ROOT

FOLDER = ROOT.parent / "docs" / "pictures"
RADIUS = 3.4
SLOWER = 0.995
"""Ratios below this one have the colour of a loss."""


@dataclass(frozen=True)
class Layout:
    """Pixels of a picture: its width, its margins, and the height of a row."""

    width: int
    left: int
    right: int
    row: int
    suffix: str
    """In the names of its files."""
    labels_above: bool
    """Whether a row's label and number are above its dots, else beside them."""
    top: int = 34

    @property
    def number(self) -> int:
        """Right end of the numbers."""
        return self.width - 4 if self.labels_above else self.left - 14


WIDE = Layout(880, 366, 24, 34, "", labels_above=False)
NARROW = Layout(380, 26, 26, 48, "-narrow", labels_above=True)
LAYOUTS = {"wide": WIDE, "narrow": NARROW}


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

    def x(self, value: float, layout: Layout) -> float:
        """The pixel of a value; those beyond the ends stand at the ends."""
        low, high = self.ticks[0], self.ticks[-1]
        inside = min(max(value, low), high)
        if self.logarithmic:
            share = math.log(inside / low) / math.log(high / low)
        else:
            share = (inside - low) / (high - low)
        return round(layout.left + share * (layout.width - layout.left - layout.right), 1)


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
    (0.2, 0.5, 1.0, 2.0, 5.0, 10.0), "time of the baseline / time with nostall, measured",
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


def draw(
    title: str, rows: Sequence[Series], axis: Axis, colours: Colours, layout: Layout = WIDE
) -> str:
    """The SVG text."""
    note = fill(axis.note, layout.width // 8).splitlines()
    bottom = layout.top + layout.row * len(rows)
    height = bottom + 24 + 16 * len(note)
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {height}" '
            f'width="{layout.width}" height="{height}" role="img" font-family="-apple-system, '
            '\'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" '
            f'aria-label="{escape(title, {chr(34): "&quot;"})}">\n',
            f'<rect width="{layout.width}" height="{height}" fill="{colours.paper}"/>\n',
            *_axis(bottom, axis, colours, layout),
            *(
                f'<text x="{layout.left}" y="{bottom + 36 + 16 * at}" fill="{colours.soft}">'
                f"{line}</text>\n"
                for at, line in enumerate(note)
            ),
            *(
                line
                for number, row in enumerate(rows)
                for line in _row(number, row, axis, colours, layout)
            ),
            "</svg>\n",
        ]
    )


def picture_name(page: str, theme: str, layout: Layout = WIDE) -> str:
    """File name of a result page's picture; an empty page is README."""
    part = f"-{page.removesuffix('.md')}" if page else ""
    return f"gains{part}{layout.suffix}-{theme}.svg"


def drawings(
    page: str, title: str, rows: Sequence[Series], axis: Axis
) -> Iterator[tuple[str, str]]:
    """File names and SVG texts of a page's picture: light and dark, wide and narrow."""
    for layout in LAYOUTS.values():
        for theme, colours in THEMES.items():
            yield picture_name(page, theme, layout), draw(title, rows, axis, colours, layout)


def picture_text(page: str, alternative: str) -> str:
    """The Markdown of a page's picture for both themes, and for wide and narrow screens."""
    folder = "../pictures" if page else "pictures"
    parts = []
    for name, layout in LAYOUTS.items():
        images = [
            f"```{{image}} {folder}/{picture_name(page, theme, layout)}\n"
            f":alt: {alternative}\n:class: only-{theme}\n```"
            for theme in THEMES
        ]
        parts += [f"::::{{container}} only-{name}", *images, "::::"]
    return "\n\n".join(parts)


def pictures(headlines: Sequence[Headline]) -> dict[str, str]:
    """File name -> SVG text: one picture of all headlines, and one for each result page."""
    pages = {"": list(headlines)}
    for headline in headlines:
        pages.setdefault(headline.page, []).append(headline)
    begin = "Measured gains of nostall beside the strongest baseline: "
    return {
        name: text
        for page, shown in pages.items()
        for name, text in drawings(
            page, begin + "; ".join(f"{h.label} {h.mean:.2f}" for h in shown),
            list(map(gain_series, shown)), GAINS,
        )
    }  # fmt: skip


def _axis(bottom: int, axis: Axis, colours: Colours, layout: Layout) -> Iterator[str]:
    top = layout.top
    digits = max(len(f"{tick:g}".partition(".")[2]) for tick in axis.ticks)
    for tick in axis.ticks:
        x, is_line = axis.x(tick, layout), tick == axis.line
        colour, width = (colours.ink, 2.5) if is_line else (colours.line, 1)
        yield f'<path d="M{x} {top - 8}V{bottom}" stroke="{colour}" stroke-width="{width}"/>\n'
        weight = ' font-weight="700"' if is_line else ""
        yield (
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="{colours.soft}"'
            f"{weight}>{tick:.{digits}f}{axis.suffix}</text>\n"
        )
    if axis.line is not None:
        x = axis.x(axis.line, layout)
        yield (
            f'<text x="{x + 10}" y="{top - 16}" fill="{colours.soft}">{axis.more}</text>'
            f'<text x="{x - 10}" y="{top - 16}" text-anchor="end" fill="{colours.soft}">'
            f"{axis.less}</text>\n"
        )
    yield (
        f'<text x="{layout.number}" y="{top - 16}" text-anchor="end" fill="{colours.soft}">'
        f"{axis.head}</text>\n"
    )


def _row(number: int, row: Series, axis: Axis, colours: Colours, layout: Layout) -> Iterator[str]:
    top = layout.top + layout.row * number
    middle = top + layout.row - WIDE.row / 2 + (5 if layout.labels_above else 0)
    words = top + 14 if layout.labels_above else middle + 4
    place = 'x="4"' if layout.labels_above else f'x="{layout.left - 92}" text-anchor="end"'
    count = f' <tspan fill="{colours.soft}">({len(row.values)})</tspan>' if row.count else ""
    yield (
        f'<text {place} y="{words}" fill="{colours.ink}" stroke="{colours.paper}" '
        f'stroke-width="5" paint-order="stroke">{escape(row.label)}{count}</text>\n'
    )
    for at, value in _spread(row.values):
        colour = colours.loss if value < axis.loses_below else colours.gain
        yield (
            f'<circle cx="{axis.x(value, layout)}" cy="{middle + at:.1f}" r="{RADIUS}" '
            f'fill="{colour}" fill-opacity=".45"/>\n'
        )
    x = axis.x(row.mark, layout)
    yield f'<path d="M{x} {middle - 13}V{middle + 13}" stroke="{colours.ink}" stroke-width="3"/>\n'
    yield (
        f'<text x="{layout.number}" y="{words}" text-anchor="end" font-weight="700" '
        f'fill="{colours.ink}">{row.text}</text>\n'
    )


def _spread(ratios: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each ratio with a distance from the middle of its row, so that equal ones show as many."""
    for number, ratio in enumerate(sorted(ratios)):
        # Multiples of the golden ratio: neighbours are far apart, and no random seed is needed.
        yield 18 * ((number * 0.618034) % 1 - 0.5), ratio
