"""SIP's simulated annealing (arXiv:2403.16863) with the parameters of its published code.

The code (``fgk/fgk/simulated_annealing.py`` in the authors' Triton fork) moves one uniformly drawn
memory instruction by one line. It accepts by the *absolute* difference in TFLOPS, at temperatures
from 1.0 down to 0.05. It runs illegal schedules on the GPU to find out; here they are rejected
before they run, counted, and take neither an evaluation nor a step.
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
from nostall.search.loop import Point, begin, draw_legal, move_to, record_trial, run

# Keys of a checkpoint's memory.
_TEMPERATURE = "temperature"
_STEPS = "iteration"


@dataclass(frozen=True, kw_only=True)
class Sip(Search):
    """Simulated annealing as published; the defaults are those of the published code.

    A step is one evaluated proposal. The search is finished when the temperature falls below
    ``end_temperature``, or after ``iterations`` steps: 998 steps by default.
    """

    name: ClassVar[str] = "sip"

    start_temperature: float = 1.0
    """In TFLOPS."""
    end_temperature: float = 0.05
    """In TFLOPS."""
    cooling_rate: float = 0.003
    """Part of the temperature that it loses in each step."""
    iterations: int = 5000
    """Most steps of one annealing."""
    restarts: bool = False
    """Whether a new annealing from the start state follows a finished one. This is not published;
    it allows comparisons over larger budgets."""
    tags: Tags = frozenset({"memory", "slide", "distance=1"})
    """Tags of the moves that are drawn."""

    def __post_init__(self) -> None:
        if not (
            0 < self.end_temperature < self.start_temperature
            and 0 < self.cooling_rate < 1
            and self.iterations > 0
        ):
            raise BadInput(
                f"sip got start_temperature={self.start_temperature}, "
                f"end_temperature={self.end_temperature}, cooling_rate={self.cooling_rate}, "
                f"iterations={self.iterations}; allowed are 0 < end_temperature < "
                "start_temperature, 0 < cooling_rate < 1 and iterations > 0; leave them out for "
                "the published values"
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
        flops = _require_flops(objective)
        task, point = begin(
            self.name, space, objective, budget, seed, observers, resume, self._first_memory()
        )

        def step(point: Point[S]) -> Point[S] | Stop:
            temperature, steps = point.memory[_TEMPERATURE], point.memory[_STEPS]
            if temperature < self.end_temperature or steps >= self.iterations:
                if not self.restarts:
                    return "finished"
                start = task.start_measurement.value
                return move_to(task, point, task.start, start, self._first_memory())
            move, rejected = draw_legal(space, point.current, task.rng, self.tags)
            if move is None:
                return "no legal move"
            candidate = space.apply(point.current, move)
            measurement = task.measure(candidate)
            gain = _tflops(flops, measurement.value) - _tflops(flops, point.value)
            accepted = gain > 0 or float(task.rng.random()) < math.exp(gain / temperature)
            memory = {_TEMPERATURE: temperature * (1.0 - self.cooling_rate), _STEPS: steps + 1}
            return record_trial(
                task, point, move, candidate, measurement, accepted, memory, rejected
            )

        return run(task, point, step)

    def _first_memory(self) -> dict[str, float]:
        return {_TEMPERATURE: self.start_temperature, _STEPS: 0.0}


def _require_flops(objective: Objective[S]) -> float:
    if objective.unit != "s" or objective.flops is None or not objective.flops > 0:
        raise BadInput(
            "strategy 'sip' accepts by TFLOPS, so it needs times and the work of a launch; got an "
            f"objective with unit {objective.unit!r} and flops {objective.flops}; allowed are "
            "unit 's' and flops > 0; give `flops = N` (per launch) in the launch file, or choose "
            "strategy 'anneal'"
        )
    return objective.flops


def _tflops(flops: float, seconds: float) -> float:
    return flops / seconds * 1e-12 if seconds > 0 else math.inf
