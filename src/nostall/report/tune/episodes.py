"""How a learning strategy came on: what its episodes earned, as one inline SVG."""

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
MOST_POINTS = 80
LEAST_EPISODES = 4
"""Of a point; fewer have no quartiles worth the name."""


@dataclass(frozen=True, slots=True)
class Point:
    """Episodes of consecutive rollouts; ``evaluations`` when the last of them ended.  What they
    earned: mean and quartiles, in per cent of the original's throughput."""

    evaluations: int
    mean: float
    low: float
    high: float


def seeded(trials: Sequence[Trial]) -> int:
    """Evaluations that were annealing, before the strategy played."""
    return sum(trial.move == ANNEALING_MOVE for trial in trials)


def points(episodes: Sequence[Episode]) -> list[Point]:
    """At most ``MOST_POINTS``, each of whole rollouts and at least ``LEAST_EPISODES`` episodes (the
    last may have fewer rollouts than the others, and takes in what is left over)."""
    rollouts = [list(group) for _, group in groupby(episodes, key=lambda e: e.rollout)]
    size = max(LEAST_EPISODES, -(-len(episodes) // MOST_POINTS))
    groups: list[list[Episode]] = []
    for rollout in rollouts:
        if groups and len(groups[-1]) < size:
            groups[-1] += rollout
        else:
            groups.append(rollout)
    if len(groups) > 1 and len(groups[-1]) < LEAST_EPISODES:
        groups[-2] += groups.pop()
    found = []
    for group in groups:
        earned = [e.total_reward for e in group]
        low, high = np.quantile(earned, (0.25, 0.75))
        found.append(Point(group[-1].evaluations, float(np.mean(earned)), float(low), float(high)))
    return found


def returns(episodes: Sequence[Episode], kind: str) -> Markup:
    """The figure; empty where fewer than two points could be drawn."""
    shown = points(episodes)
    if len(shown) < 2:
        return Markup("")
    frame = _frame(shown)
    upper = [frame.at(p.evaluations, p.high) for p in shown]
    lower = [frame.at(p.evaluations, p.low) for p in reversed(shown)]
    means = "L".join(frame.at(p.evaluations, p.mean) for p in shown)
    values = ((tick, f"{tick:.6g} %") for tick in ticks(frame.low, frame.high, 4))
    parts = [
        frame.open(f"{kind} return of the episodes, mean and quartiles"),
        *frame.axes(f"{kind} return", values, base=0),
        f'<path class="quartiles" d="M{"L".join([*upper, *lower])}Z"/>',
        f'<path class="mean" d="M{means}"/>',
        "</svg>",
    ]
    return Markup("".join(parts))


def _frame(shown: Sequence[Point]) -> Plot:
    """0 is always inside."""
    low = min(0.0, *(min(p.low, p.mean) for p in shown))
    high = max(0.0, *(max(p.high, p.mean) for p in shown))
    room = 0.06 * (high - low) or 1.0
    return Plot(_HEIGHT, 0, max(2, shown[-1].evaluations), low - room, high + room)
