"""The figures of the pages, as inline SVG; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from nostall.report.units import ticks

WIDTH = 620
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 42
MOST_POINTS = 400
"""Points of a curve that are drawn; of a longer one, evenly chosen."""


@dataclass(frozen=True)
class Line:
    """One curve: its name, its style class, and its points."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]


def stacked(rows: Sequence[tuple[str, Mapping[str, float]]], styles: Mapping[str, str]) -> Markup:
    """One horizontal bar a row, split into shares that sum to 1."""
    label, bar, height = 190, 1280 - 190 - 24, 26
    parts = [_open(1280, len(rows) * height + 24, "shares of time, one bar a row")]
    for at, (name, shares) in enumerate(rows):
        x, y = float(label), at * height
        parts.append(_text(label - 8, y + 16, name, "end", "label"))
        for part, style in styles.items():
            width = bar * shares.get(part, 0.0)
            if width >= 0.05:
                said = f"{name}: {part.replace('_', ' ')} {shares[part]:.1%}"
                parts.append(
                    f'<rect class="{style}" x="{x:.1f}" y="{y + 3}" width="{width:.1f}" '
                    f'height="{height - 6}"><title>{escape(said)}</title></rect>'
                )
                if width > 46:
                    parts.append(
                        _text(x + width / 2, y + 17, f"{shares[part]:.0%}", "middle", "on")
                    )
            x += width
    below = len(rows) * height
    for percent in range(0, 101, 20):
        parts.append(
            _text(label + bar * percent / 100, below + 16, f"{percent}%", "middle", "tick")
        )
    return Markup("".join([*parts, "</svg>"]))


def curves(
    lines: Sequence[Line], across: str, up: str, *, percent: bool = False, log: bool = False
) -> Markup:
    """Curves over common axes; ``log`` for the one across, ``percent`` for shares up."""
    drawn = [line for line in lines if len(line.x)]
    if not drawn:
        return Markup("")
    frame = _Frame(drawn, percent, log)
    parts = [_open(WIDTH, frame.height, f"{up} over {across}"), *_axes(frame, across, up)]
    for line in drawn:
        keep = np.unique(np.linspace(0, len(line.x) - 1, MOST_POINTS).astype(int))
        points = " ".join(f"{frame.x(line.x[i])},{frame.y(line.y[i])}" for i in keep)
        title = f"<title>{escape(line.name)}</title>"
        parts.append(f'<polyline class="line {line.style}" points="{points}">{title}</polyline>')
    return Markup("".join([*parts, "</svg>"]))


def columns(shares: np.ndarray, styles: Sequence[str], seconds: float) -> Markup:
    """A timeline: in each slice, from below, the share of each kind of work."""
    width, height = 1280, 120
    step = width / shares.shape[1]
    parts = [_open(width, height + 24, "what the GPU did over time")]
    base = np.zeros(shares.shape[1])
    for row, style in zip(shares, styles, strict=True):
        top = np.minimum(base + row, 1.0)
        path = "".join(
            f"M{i * step:.1f} {height * (1 - low):.1f}V{height * (1 - high):.1f}h{step:.2f}"
            f"V{height * (1 - low):.1f}z"
            for i, (low, high) in enumerate(zip(base, top, strict=True))
            if high - low > 0.004
        )
        parts.append(f'<path class="{style}" d="{path}"/>')
        base = top
    parts.append(f'<path class="grid" d="M0 {height}H{width}"/>')
    for tick in ticks(0.0, seconds * 1e3, 8):
        x = min(max(width * tick / (seconds * 1e3), 14), width - 30)
        parts.append(_text(x, height + 16, f"{tick:.6g} ms", "middle", "tick"))
    return Markup("".join([*parts, "</svg>"]))


def steps(values: Sequence[float], shares: Sequence[float]) -> tuple[list[float], list[float]]:
    """The corners of a cumulative distribution: up at each value, level in between."""
    chosen = np.unique(np.linspace(0, len(values) - 1, MOST_POINTS // 2).astype(int))
    x, y, below = [], [], 0.0
    for at in chosen:
        x += [values[at], values[at]]
        y += [below, shares[at]]
        below = shares[at]
    return x, y


class _Frame:
    height = 300

    def __init__(self, lines: Sequence[Line], percent: bool, log: bool) -> None:
        xs = [v for line in lines for v in (min(line.x), max(line.x))]
        ys = [v for line in lines for v in (min(line.y), max(line.y))]
        self.percent, self.log = percent, log
        self.low, self.high = self._across(min(xs)), self._across(max(xs))
        if self.high <= self.low:
            self.high = self.low + 1.0
        self.bottom, self.top = (0.0, 1.0) if percent else (min(0.0, *ys), max(ys) * 1.05 or 1.0)

    def _across(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def x(self, value: float) -> float:
        share = (self._across(value) - self.low) / (self.high - self.low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.bottom) / (self.top - self.bottom)
        return round(self.height - BOTTOM - share * (self.height - TOP - BOTTOM), 1)

    def ticks_across(self) -> list[tuple[float, str]]:
        if self.log:
            wide = self.high - self.low > 2
            steps = (1,) if wide else (1, 2, 5)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [m * 10.0**n for n in powers for m in steps]
            inside = [v for v in values if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
            if len(inside) < 2:  # less than a step of 1, 2, 5 across
                inside = ticks(10**self.low, 10**self.high, 5)
            every = max(1, len(inside) // 7)
            return [(v, f"{v:.4g}") for v in inside[::every]]
        return [(t, f"{t:.6g}") for t in ticks(self.low, self.high, 6)]


def _axes(frame: _Frame, across: str, up: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, frame.height - BOTTOM
    parts = []
    for tick in ticks(frame.bottom, frame.top):
        y = frame.y(tick)
        said = f"{tick:.0%}" if frame.percent else f"{tick:.4g}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        parts.append(_text(LEFT - 8, y + 4, said, "end", "tick"))
    for value, said in frame.ticks_across():
        x = frame.x(value)
        parts.append(f'<path class="grid" d="M{x} {bottom}v5"/>')
        parts.append(_text(x, bottom + 18, said, "middle", "tick"))
    middle = (TOP + bottom) / 2
    parts.append(_text((LEFT + right) / 2, frame.height - 6, across, "middle", "axis"))
    parts.append(
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(up)}</text>"
    )
    return parts


def _open(width: float, height: float, said: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(said)}">'
    )


def _text(x: float, y: float, said: str, anchor: str, style: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(said)}</text>'
