"""Figures of a search as inline SVGs: values of evaluations, returns of a learner's episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup, escape

from nostall.core import Trial
from nostall.report.units import Scale, tick_labels, ticks
from nostall.search.episodes import ANNEALING_MOVE, Episode

# Width and margins of the plot in pixels.
WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 40


@dataclass(frozen=True, slots=True)
class Plot:
    """Maps evaluations and values to pixels; higher values are drawn higher."""

    height: int
    """Pixels, margins included."""
    first: int
    """Evaluation at the left edge."""
    last: int
    """Evaluation at the right edge."""
    low: float
    """Value at the lower edge."""
    high: float
    """Value at the upper edge; higher values are drawn there, too."""

    @property
    def right(self) -> int:
        return WIDTH - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def open(self, label: str) -> str:
        """The opening tag of the SVG."""
        return (
            f'<svg class="curve" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{label}">'
        )

    def x(self, evaluation: float) -> float:
        share = (evaluation - self.first) / (self.last - self.first)
        return round(LEFT + share * (self.right - LEFT), 1)

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / (self.high - self.low)
        return round(self.bottom - share * (self.bottom - TOP), 1)

    def point(self, evaluation: float, value: float) -> str:
        """The coordinates of a point, for a path."""
        return f"{self.x(evaluation)} {self.y(value)}"

    def axes(
        self, title: str, values: Iterable[tuple[float, str]], base: float | None = None
    ) -> Iterator[str]:
        """Both axes.

        ``title`` and ``values`` (ticks with their labels) are those of the vertical axis.  The line
        of the tick ``base`` has the style of the original's line.
        """
        for value, label in values:
            y = self.y(value)
            line = "start" if value == base else "grid"
            yield f'<path class="{line}" d="M{LEFT} {y}H{self.right}"/>'
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>'
        for tick in ticks(self.first, self.last, 8):
            if tick == int(tick):
                x = self.x(tick)
                yield f'<path class="grid" d="M{x} {self.bottom}v5"/>'
                yield (
                    f'<text class="tick" x="{x}" y="{self.bottom + 18}" text-anchor="middle">'
                    f"{int(tick):,}</text>"
                )
        yield (
            f'<text class="axis" transform="translate(16 {(TOP + self.bottom) / 2}) rotate(-90)" '
            f'text-anchor="middle">{title}</text>'
            f'<text class="axis" x="{(LEFT + self.right) / 2}" y="{self.height - 6}" '
            'text-anchor="middle">evaluations</text>'
        )


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


_EPISODES_HEIGHT = 230
MAX_POINTS = 80
MIN_EPISODES = 4
"""Episodes per point; fewer have no meaningful quartiles."""


@dataclass(frozen=True, slots=True)
class Point:
    """Returns of the episodes of consecutive rollouts, in per cent of the original's throughput."""

    evaluations: int
    """Evaluations of the search when the last episode ended."""
    mean: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""


def count_annealing_trials(trials: Sequence[Trial]) -> int:
    """Evaluations by annealing, which precede the episodes of a learning strategy."""
    return sum(trial.move == ANNEALING_MOVE for trial in trials)


def group_episodes(episodes: Sequence[Episode]) -> list[Point]:
    """At most :data:`MAX_POINTS` points of full rollouts, each of at least :data:`MIN_EPISODES`.

    The last rollouts are merged into the previous point if they have too few episodes.
    """
    rollouts = [list(group) for _, group in groupby(episodes, key=lambda e: e.rollout)]
    size = max(MIN_EPISODES, -(-len(episodes) // MAX_POINTS))
    groups: list[list[Episode]] = []
    for rollout in rollouts:
        if groups and len(groups[-1]) < size:
            groups[-1] += rollout
        else:
            groups.append(rollout)
    if len(groups) > 1 and len(groups[-1]) < MIN_EPISODES:
        last = groups.pop()
        groups[-1] += last
    points = []
    for group in groups:
        returns = [episode.total_reward for episode in group]
        low, high = np.quantile(returns, (0.25, 0.75))
        mean = float(np.mean(returns))
        points.append(Point(group[-1].evaluations, mean, float(low), float(high)))
    return points


def draw_returns(episodes: Sequence[Episode], kind: str) -> Markup:
    """The figure; empty if there are fewer than two points."""
    points = group_episodes(episodes)
    if len(points) < 2:
        return Markup("")
    plot = _plot_episodes(points)
    upper = [plot.point(p.evaluations, p.high) for p in points]
    lower = [plot.point(p.evaluations, p.low) for p in reversed(points)]
    means = "L".join(plot.point(p.evaluations, p.mean) for p in points)
    values = ((tick, f"{tick:.6g} %") for tick in ticks(plot.low, plot.high, 4))
    parts = [
        plot.open(f"{kind} return of the episodes, mean and quartiles"),
        *plot.axes(f"{kind} return", values, base=0),
        f'<path class="quartiles" d="M{"L".join([*upper, *lower])}Z"/>',
        f'<path class="mean" d="M{means}"/>',
        "</svg>",
    ]
    return Markup("".join(parts))


def _plot_episodes(points: Sequence[Point]) -> Plot:
    """A plot whose vertical axis includes 0."""
    low = min(0.0, *(min(p.low, p.mean) for p in points))
    high = max(0.0, *(max(p.high, p.mean) for p in points))
    margin = 0.06 * (high - low) or 1.0
    return Plot(_EPISODES_HEIGHT, 0, max(2, points[-1].evaluations), low - margin, high + margin)
