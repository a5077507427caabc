"""The picture of README and the start page: a dot for each measured ratio, on a logarithmic axis.

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
WIDTH, LEFT, RIGHT, TOP, ROW, FOOT = 880, 310, 92, 34, 34, 40
"""Pixels: the picture, its margins, the height of a row."""
LOW, HIGH = 0.7, 10.0
"""Ends of the axis."""
TICKS = (0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
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


THEMES = {
    "light": Colours("#ffffff", "#1b2430", "#57606a", "#d8dee4", "#1f6feb", "#bc4c00"),
    "dark": Colours("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#58a6ff", "#f0883e"),
}


def draw(headlines: Sequence[Headline], colours: Colours) -> str:
    """The SVG text."""
    height = TOP + ROW * len(headlines) + FOOT
    title = "Measured gains of nostall beside the strongest baseline: " + "; ".join(
        f"{h.label} {h.mean:.2f}" for h in headlines
    )
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" font-family="-apple-system, '
            '\'Segoe UI\', Helvetica, Arial, sans-serif" font-size="13" '
            f'aria-label="{escape(title, {chr(34): "&quot;"})}">\n',
            f'<rect width="{WIDTH}" height="{height}" fill="{colours.paper}"/>\n',
            *_axis(height, colours),
            *(line for number, h in enumerate(headlines) for line in _row(number, h, colours)),
            "</svg>\n",
        ]
    )


def picture_name(page: str, theme: str) -> str:
    """File name of a result page's picture; an empty page is README."""
    part = f"-{page.removesuffix('.md')}" if page else ""
    return f"gains{part}-{theme}.svg"


def pictures(headlines: Sequence[Headline]) -> dict[str, str]:
    """File name -> SVG text: one picture of all headlines, and one for each result page."""
    pages = {"": list(headlines)}
    for headline in headlines:
        pages.setdefault(headline.page, []).append(headline)
    return {
        picture_name(page, theme): draw(shown, colours)
        for page, shown in pages.items()
        for theme, colours in THEMES.items()
    }


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _axis(height: int, colours: Colours) -> Iterator[str]:
    bottom = height - FOOT
    for tick in TICKS:
        x, is_one = _x(tick), tick == 1.0
        colour, width = (colours.ink, 2.5) if is_one else (colours.line, 1)
        yield f'<path d="M{x} {TOP - 8}V{bottom}" stroke="{colour}" stroke-width="{width}"/>\n'
        weight = ' font-weight="700"' if is_one else ""
        yield (
            f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" fill="{colours.soft}"'
            f"{weight}>{tick:g}×</text>\n"
        )
    yield (
        f'<text x="{_x(1.0) + 10}" y="{TOP - 16}" fill="{colours.soft}">nostall is faster →</text>'
        f'<text x="{_x(1.0) - 10}" y="{TOP - 16}" text-anchor="end" fill="{colours.soft}">'
        "← slower</text>\n"
        f'<text x="{WIDTH - 8}" y="{TOP - 16}" text-anchor="end" fill="{colours.soft}">mean</text>'
        f'<text x="{LEFT}" y="{height - 4}" fill="{colours.soft}">time of the baseline / time with '
        "nostall, measured</text>\n"
    )


def _row(number: int, headline: Headline, colours: Colours) -> Iterator[str]:
    middle = TOP + ROW * number + ROW / 2
    yield (
        f'<text x="{LEFT - 16}" y="{middle + 4}" text-anchor="end" fill="{colours.ink}">'
        f'{escape(headline.label)} <tspan fill="{colours.soft}">({len(headline.ratios)})</tspan>'
        "</text>\n"
    )
    for at, ratio in _spread(headline.ratios):
        colour = colours.loss if ratio < SLOWER else colours.gain
        yield (
            f'<circle cx="{_x(ratio)}" cy="{middle + at:.1f}" r="{RADIUS}" fill="{colour}" '
            'fill-opacity=".45"/>\n'
        )
    x = _x(headline.mean)
    yield f'<path d="M{x} {middle - 13}V{middle + 13}" stroke="{colours.ink}" stroke-width="3"/>\n'
    yield (
        f'<text x="{WIDTH - 8}" y="{middle + 4}" text-anchor="end" font-weight="700" '
        f'fill="{colours.ink}">{headline.mean:.{headline.digits}f}×</text>\n'
    )


def _spread(ratios: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each ratio with a distance from the middle of its row, so that equal ones show as many."""
    for number, ratio in enumerate(sorted(ratios)):
        # Multiples of the golden ratio: neighbours are far apart, and no random seed is needed.
        yield 18 * ((number * 0.618034) % 1 - 0.5), ratio
