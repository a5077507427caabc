"""Figure of a learning run: the return of its episodes as an inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup

from nostall.core import Trial
from nostall.report.plot import Plot
from nostall.report.units import ticks
from nostall.search.episodes import ANNEALING_MOVE, Episode

_HEIGHT = 230
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
    plot = _plot(points)
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


def _plot(points: Sequence[Point]) -> Plot:
    """A plot whose vertical axis includes 0."""
    low = min(0.0, *(min(p.low, p.mean) for p in points))
    high = max(0.0, *(max(p.high, p.mean) for p in points))
    margin = 0.06 * (high - low) or 1.0
    return Plot(_HEIGHT, 0, max(2, points[-1].evaluations), low - margin, high + margin)
