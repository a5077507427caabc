"""Figure of a search: the value of each evaluation and the best so far, as an inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nostall.core import Trial
from nostall.report.plot import LEFT, TOP, Plot
from nostall.report.units import Scale, tick_labels, ticks

_EPISODES_WIDTH = 70
"""Pixels of the label of the episodes."""
_HEIGHT = 300
MAX_DOTS = 4000
"""Evaluations that are drawn; of a longer search, every n-th is drawn."""
VISIBLE_SHARE = 0.85
"""Share of the evaluations, best first, that the vertical axis covers."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """An evaluation that became the best so far."""

    index: int
    value: float
    move: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the figure shows of a search."""

    timed: int
    """Evaluations with a time."""
    shown: int
    """Those that are drawn."""
    above: int
    """Those drawn at the upper edge, because their value is above the range."""


def count_drawn(trials: Sequence[Trial]) -> Drawn:
    """Counts of the figure that :func:`draw_search_curve` makes."""
    timed = [t for t in trials if math.isfinite(t.value)]
    if not timed:
        return Drawn(0, 0, 0)
    plot = _plot(trials)
    shown = [t for t in trials[:: _step(trials)] if math.isfinite(t.value)]
    return Drawn(len(timed), len(shown), sum(t.value > plot.high for t in shown))


def _step(trials: Sequence[Trial]) -> int:
    return max(1, len(trials) // MAX_DOTS)


def find_improvements(trials: Sequence[Trial]) -> list[Improvement]:
    """The start and each improvement, oldest first."""
    improvements: list[Improvement] = []
    for trial in trials:
        is_better = not improvements or trial.value < improvements[-1].value
        if trial.failure is None and is_better:
            improvements.append(Improvement(trial.index, trial.value, trial.move))
    return improvements


def draw_search_curve(
    trials: Sequence[Trial], scale: Scale, kind: str, num_annealing: int = 0
) -> Markup:
    """The figure; empty if nothing was evaluated.

    ``num_annealing``: evaluations after the start by which a learning strategy annealed.
    """
    if not any(math.isfinite(t.value) for t in trials):
        return Markup("")
    plot = _plot(trials)
    shown = trials[:: _step(trials)]
    parts = [
        plot.open(f"{kind} value of each evaluation and the best so far"),
        _annealing_area(plot, num_annealing),
        *plot.axes(f"{kind} {escape(scale.unit)}", _ticks(plot, scale)),
        _dots("tried", (t for t in shown if not t.accepted and t.failure is None), plot),
        _dots("accepted", (t for t in shown if t.accepted), plot),
        _dots("failed", (t for t in shown if t.failure is not None), plot),
        _original_line(plot, trials, scale, kind),
        _best_line(plot, trials),
        _annealing_labels(plot, num_annealing),
        "</svg>",
    ]
    return Markup("".join(parts))


def _plot(trials: Sequence[Trial]) -> Plot:
    values = sorted(t.value for t in trials if math.isfinite(t.value))
    low = values[0]
    start = next(t.value for t in trials if math.isfinite(t.value))
    high = max(values[int(VISIBLE_SHARE * (len(values) - 1))], start)
    # A few outliers would compress all other values.
    high = min(high, start + 3 * max(start - low, 0.02 * start))
    margin = 0.06 * (high - low) or 0.02 * abs(high) or 1.0
    first = trials[0].index
    last = max(trials[-1].index, first + 1)
    return Plot(_HEIGHT, first, last, low - margin, high + margin)


def _ticks(plot: Plot, scale: Scale) -> Iterator[tuple[float, str]]:
    values = ticks(plot.low * scale.factor, plot.high * scale.factor)
    for tick, label in zip(values, tick_labels(values), strict=True):
        yield tick / scale.factor, label


def _annealing_area(plot: Plot, num_annealing: int) -> str:
    """Shaded area of the annealing that precedes the episodes of a learning strategy."""
    if not num_annealing:
        return ""
    left, right = plot.x(plot.first), plot.x(plot.first + num_annealing)
    return (
        f'<rect class="seeding" x="{left}" y="{TOP}" width="{right - left:.1f}" '
        f'height="{plot.bottom - TOP}"/>'
    )


def _annealing_labels(plot: Plot, num_annealing: int) -> str:
    """Names of the area and of what follows, above the plot, where no line crosses them."""
    if not num_annealing:
        return ""
    left, right = plot.x(plot.first), plot.x(plot.first + num_annealing)
    texts = [(left, "annealing")]
    if right + _EPISODES_WIDTH < plot.right:
        texts.append((right, "episodes"))
    return "".join(
        f'<text class="startlabel" x="{x}" y="{TOP - 3}">{text}</text>' for x, text in texts
    )


def _dots(style: str, trials: Iterable[Trial], plot: Plot) -> str:
    # One NaN in a path would hide all of its points.
    drawn = (t for t in trials if not math.isnan(t.value))
    path = "".join(f"M{plot.x(t.index)} {plot.y(t.value)}h0" for t in drawn)
    return f'<path class="dot {style}" d="{path}"/>' if path else ""


def _original_line(plot: Plot, trials: Sequence[Trial], scale: Scale, kind: str) -> str:
    value = next(t.value for t in trials if math.isfinite(t.value))
    y = plot.y(value)
    return (
        f'<path class="start" d="M{LEFT} {y}H{plot.right}"/>'
        f'<text class="startlabel" x="{plot.right - 4}" y="{y - 6}" text-anchor="end">'
        f"original, {kind} {escape(scale(value))}</text>"
    )


def _best_line(plot: Plot, trials: Sequence[Trial]) -> str:
    first, *further = find_improvements(trials)
    path = f"M{plot.x(first.index)} {plot.y(first.value)}"
    for improvement in further:
        path += f"H{plot.x(improvement.index)}V{plot.y(improvement.value)}"
    return f'<path class="best" d="{path}H{plot.x(plot.last)}"/>'
