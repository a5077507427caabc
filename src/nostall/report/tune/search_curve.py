"""The course of a search as one inline SVG: every evaluation, the best so far, the start."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nostall.core import Trial
from nostall.report.plot import LEFT, TOP, Plot
from nostall.report.units import Scale, ticks

_HEIGHT = 300
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
    frame = _frame(trials)
    step = max(1, len(trials) // MOST_DOTS)
    shown = trials[::step]
    parts = [
        frame.open(f"{kind} value of each evaluation and the best so far"),
        _seeding(frame, seeded),
        *frame.axes(f"{kind} {escape(scale.unit)}", _ticks(frame, scale)),
        _dots("tried", (t for t in shown if not t.accepted and t.failure is None), frame),
        _dots("accepted", (t for t in shown if t.accepted), frame),
        _dots("failed", (t for t in shown if t.failure is not None), frame),
        _start(frame, trials, scale, kind),
        _best(frame, trials),
        "</svg>",
    ]
    return Markup("".join(parts))


def _frame(trials: Sequence[Trial]) -> Plot:
    values = sorted(t.value for t in trials if math.isfinite(t.value))
    low = values[0]
    start = next(t.value for t in trials if math.isfinite(t.value))
    high = max(values[int(SHOWN_BAD * (len(values) - 1))], start)
    # Single outliers would flatten everything else.
    high = min(high, start + 3 * max(start - low, 0.02 * start))
    room = 0.06 * (high - low) or 0.02 * abs(high) or 1.0
    first = trials[0].index
    return Plot(_HEIGHT, first, max(trials[-1].index, first + 1), low - room, high + room)


def _ticks(frame: Plot, scale: Scale) -> Iterator[tuple[float, str]]:
    for tick in ticks(frame.low * scale.factor, frame.high * scale.factor):
        yield tick / scale.factor, f"{tick:.6g}"


def _seeding(frame: Plot, seeded: int) -> str:
    """Where the annealing that a learning strategy begins with lies."""
    if not seeded:
        return ""
    left, right = frame.x(frame.first), frame.x(frame.first + seeded)
    return (
        f'<rect class="seeding" x="{left}" y="{TOP}" width="{right - left:.1f}" '
        f'height="{frame.bottom - TOP}"/>'
        f'<text x="{left + 6}" y="{frame.bottom - 8}">annealing</text>'
        f'<text x="{right + 6}" y="{frame.bottom - 8}">play</text>'
    )


def _dots(name: str, trials: Iterable[Trial], frame: Plot) -> str:
    path = "".join(f"M{frame.x(t.index)} {frame.y(t.value)}h0" for t in trials)
    return f'<path class="dot {name}" d="{path}"/>' if path else ""


def _start(frame: Plot, trials: Sequence[Trial], scale: Scale, kind: str) -> str:
    value = next(t.value for t in trials if math.isfinite(t.value))
    y = frame.y(value)
    return (
        f'<path class="start" d="M{LEFT} {y}H{frame.right}"/>'
        f'<text class="startlabel" x="{frame.right - 4}" y="{y - 6}" text-anchor="end">'
        f"original, {kind} {escape(scale(value))}</text>"
    )


def _best(frame: Plot, trials: Sequence[Trial]) -> str:
    steps = improvements(trials)
    path = f"M{frame.x(steps[0].index)} {frame.y(steps[0].value)}"
    for step in steps[1:]:
        path += f"H{frame.x(step.index)}V{frame.y(step.value)}"
    return f'<path class="best" d="{path}H{frame.x(frame.last)}"/>'
