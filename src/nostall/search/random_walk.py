"""Random search, the baseline of all strategies: a random walk that keeps the best state."""

from __future__ import annotations

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
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.search.loop import Point, begin, move_to, record_trial, run

_STEPS = "steps"
"""Key of a checkpoint's memory: steps since the start state."""


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Search):
    """Uniform random walk that keeps the best state it visits.

    A step takes one move, uniform over all legal moves of the current state, evaluates the new
    state (even if it was evaluated before) and goes to it unless it fails. After ``walk_length``
    steps, and from a state without legal moves, the walk returns to the start state.
    """

    name: ClassVar[str] = "random"

    walk_length: int = 64

    def __post_init__(self) -> None:
        if self.walk_length < 1:
            raise BadInput(
                f"random got walk_length={self.walk_length}; allowed is at least 1 step; leave it "
                "out for the default of 64"
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
        """Walk until the budget is spent."""
        task, point = begin(
            self.name, space, objective, budget, seed, observers, resume, {_STEPS: 0.0}
        )

        def step(point: Point[S]) -> Point[S] | Stop:
            steps = point.memory[_STEPS]
            move = space.propose(point.current, task.rng) if steps < self.walk_length else None
            if move is None:
                if steps == 0:
                    return "no legal move"
                start = task.start_measurement.value
                return move_to(task, point, task.start, start, {_STEPS: 0.0})
            candidate = space.apply(point.current, move)
            measurement = task.measure(candidate)
            memory = {_STEPS: steps + 1}
            return record_trial(task, point, move, candidate, measurement, True, memory)

        return run(task, point, step)
