"""SIP's simulated annealing (arXiv:2403.16863), with the parameters of its published code.

The code (``fgk/fgk/simulated_annealing.py`` in the authors' Triton fork) moves one uniformly drawn
memory instruction by one line and accepts by the *absolute* difference in TFLOPS, at temperatures
from 1.0 down to 0.05.  It runs illegal schedules and lets the GPU tell; here they are refused
before they run, counted, and cost neither an evaluation nor a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nostall.core import (
    BadInput,
    Budget,
    Checkpoint,
    Objective,
    Observer,
    Search,
    SearchResult,
    Space,
    Tags,
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.search.loop import Point, begin, draw_legal, move_to, run, settle


@dataclass(frozen=True, kw_only=True)
class Sip(Search):
    """Simulated annealing as published; the defaults are the published code's.

    A step is one evaluated proposal.  The temperature (in TFLOPS) starts at ``hot`` and loses the
    part ``cooling`` with each step; below ``cold``, or after ``iterations`` steps, the search is
    finished: 998 steps by default.  ``restarts`` (not published) then begins a new annealing from
    the start state, so that SIP can be compared over longer budgets.  ``tags`` are those that a
    move must carry to be drawn.
    """

    name: ClassVar[str] = "sip"

    hot: float = 1.0
    cold: float = 0.05
    cooling: float = 0.003
    iterations: int = 5000
    restarts: bool = False
    tags: Tags = frozenset({"memory", "slide", "distance=1"})

    def __post_init__(self) -> None:
        if not (0 < self.cold < self.hot and 0 < self.cooling < 1 and self.iterations > 0):
            raise BadInput(
                f"sip got hot={self.hot}, cold={self.cold}, cooling={self.cooling}, "
                f"iterations={self.iterations}; allowed are 0 < cold < hot, 0 < cooling < 1 and "
                "iterations > 0; leave them out for the published values"
            )

    def run(
        self,
        space: Space[S, M],
        objective: Objective[S],
        budget: Budget,
        *,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resume: Checkpoint | None = None,
    ) -> SearchResult[S]:
        """Anneal; raises :class:`BadInput` for an objective whose throughput is unknown."""
        flops = _flops(objective)
        task, point = begin(
            self.name, space, objective, budget, seed, observers, resume, self._fresh()
        )

        def step(point: Point[S]) -> Point[S] | Stop:
            memory = point.memory
            if memory["temperature"] < self.cold or memory["iteration"] >= self.iterations:
                if not self.restarts:
                    return "finished"
                start = task.start_measurement.value
                return move_to(task, point, task.start, start, self._fresh())
            move, rejected = draw_legal(space, point.current, task.rng, self.tags)
            if move is None:
                return "no legal move"
            candidate = space.apply(point.current, move)
            measurement = task.measure(candidate)
            temperature = memory["temperature"]
            gain = _tflops(flops, measurement.value) - _tflops(flops, point.value)
            accepted = gain > 0 or float(task.rng.random()) < math.exp(gain / temperature)
            cooler = {
                "temperature": temperature * (1.0 - self.cooling),
                "iteration": memory["iteration"] + 1,
            }
            return settle(task, point, move, candidate, measurement, accepted, cooler, rejected)

        return run(task, point, step)

    def _fresh(self) -> dict[str, float]:
        return {"temperature": self.hot, "iteration": 0.0}


def _flops(objective: Objective[S]) -> float:
    if objective.unit != "s" or objective.flops is None or not objective.flops > 0:
        raise BadInput(
            "strategy 'sip' accepts by TFLOPS and so needs times and the work done in them; got "
            f"an objective with unit {objective.unit!r} and flops {objective.flops}; allowed are "
            "unit 's' and flops > 0; give `flops = N` (per launch) in the launch file, or choose "
            "strategy 'anneal'"
        )
    return objective.flops


def _tflops(flops: float, seconds: float) -> float:
    return flops / seconds * 1e-12 if seconds > 0 else math.inf
