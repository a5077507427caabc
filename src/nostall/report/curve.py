"""The course of a search as one inline SVG: every evaluation, the best so far, the start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nostall.core import Trial
from nostall.report.units import Scale, ticks

WIDTH, HEIGHT = 1280, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 40
MOST_DOTS = 4000
"""Evaluations that are drawn; of a longer search every n-th."""
SHOWN_BAD = 0.85
"""Share of the evaluations, best first, that must fit; worse ones are drawn at the upper edge."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """An evaluation that became the best so far."""

    index: int
    value: float
    move: str


def improvements(trials: Sequence[Trial]) -> list[Improvement]:
    """The start and every improvement, oldest first."""
    found: list[Improvement] = []
    for trial in trials:
        if trial.failure is None and (not found or trial.value < found[-1].value):
            found.append(Improvement(trial.index, trial.value, trial.move))
    return found


def curve(trials: Sequence[Trial], scale: Scale, kind: str, seeded: int = 0) -> Markup:
    """The figure; empty when nothing was evaluated.  The first ``seeded`` evaluations after the
    start were annealing, before a learning strategy played."""
    if not any(math.isfinite(t.value) for t in trials):
        return Markup("")
    frame = _Frame(trials)
    step = max(1, len(trials) // MOST_DOTS)
    shown = trials[::step]
    parts = [
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{kind} value of each evaluation and the best so far">',
        _seeding(frame, seeded),
        *_axes(frame, scale, kind),
        _dots("tried", (t for t in shown if not t.accepted and t.failure is None), frame),
        _dots("accepted", (t for t in shown if t.accepted), frame),
        _dots("failed", (t for t in shown if t.failure is not None), frame),
        _start(frame, trials, scale, kind),
        _best(frame, trials),
        "</svg>",
    ]
    return Markup("".join(parts))


class _Frame:
    """Maps evaluations and values to the drawing; worse values than ``high`` go to its edge."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        values = sorted(t.value for t in trials if math.isfinite(t.value))
        low = values[0]
        start = next(t.value for t in trials if math.isfinite(t.value))
        high = max(values[int(SHOWN_BAD * (len(values) - 1))], start)
        # Single outliers would flatten everything else.
        high = min(high, start + 3 * max(start - low, 0.02 * start))
        room = 0.06 * (high - low) or 0.02 * abs(high) or 1.0
        self.low, self.high = low - room, high + room
        self.first, self.last = trials[0].index, max(trials[-1].index, trials[0].index + 1)

    def x(self, index: int) -> float:
        share = (index - self.first) / (self.last - self.first)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def _seeding(frame: _Frame, seeded: int) -> str:
    """Where the annealing that a learning strategy begins with lies."""
    if not seeded:
        return ""
    left, right = frame.x(frame.first), frame.x(frame.first + seeded)
    bottom = HEIGHT - BOTTOM
    return (
        f'<rect class="seeding" x="{left}" y="{TOP}" width="{right - left:.1f}" '
        f'height="{bottom - TOP}"/>'
        f'<text x="{left + 6}" y="{bottom - 8}">annealing</text>'
        f'<text x="{right + 6}" y="{bottom - 8}">play</text>'
    )


def _axes(frame: _Frame, scale: Scale, kind: str) -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    factor = scale.factor
    for tick in ticks(frame.low * factor, frame.high * factor):
        y = frame.y(tick / factor)
        yield f'<path class="grid" d="M{LEFT} {y}H{right}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:.6g}</text>'
    for tick in ticks(frame.first, frame.last, 8):
        if tick == int(tick):
            x = frame.x(int(tick))
            yield f'<path class="grid" d="M{x} {bottom}v5"/>'
            yield (
                f'<text class="tick" x="{x}" y="{bottom + 18}" text-anchor="middle">'
                f"{int(tick):,}</text>"
            )
    middle = (TOP + bottom) / 2
    yield (
        f'<text class="axis" transform="translate(16 {middle}) rotate(-90)" '
        f'text-anchor="middle">{kind} {escape(scale.unit)}</text>'
        f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "evaluations</text>"
    )


def _dots(name: str, trials: Iterable[Trial], frame: _Frame) -> str:
    path = "".join(f"M{frame.x(t.index)} {frame.y(t.value)}h0" for t in trials)
    return f'<path class="dot {name}" d="{path}"/>' if path else ""


def _start(frame: _Frame, trials: Sequence[Trial], scale: Scale, kind: str) -> str:
    value = next(t.value for t in trials if math.isfinite(t.value))
    y = frame.y(value)
    return (
        f'<path class="start" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>'
        f'<text class="startlabel" x="{WIDTH - RIGHT - 4}" y="{y - 6}" text-anchor="end">'
        f"original, {kind} {escape(scale(value))}</text>"
    )


def _best(frame: _Frame, trials: Sequence[Trial]) -> str:
    steps = improvements(trials)
    path = f"M{frame.x(steps[0].index)} {frame.y(steps[0].value)}"
    for step in steps[1:]:
        path += f"H{frame.x(step.index)}V{frame.y(step.value)}"
    return f'<path class="best" d="{path}H{frame.x(frame.last)}"/>'
