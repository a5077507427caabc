"""The baseline that every strategy has to beat: an undirected walk that remembers the best."""

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
from nostall.search.loop import Point, begin, move_to, run, settle


@dataclass(frozen=True, kw_only=True)
class RandomSearch(Search):
    """Uniform random walk that keeps the best state it passes.

    The exact rule: from the current state take one move uniform over all legal moves, evaluate
    the new state (one evaluation, also for a state seen before), go there unless it failed; after
    ``length`` evaluations, and in a state without legal moves, go back to the start state.
    """

    name: ClassVar[str] = "random"

    length: int = 64

    def __post_init__(self) -> None:
        if self.length < 1:
            raise BadInput(
                f"random got length={self.length}; allowed is a walk of at least 1 step; leave it "
                "out for the usual 64"
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
            self.name, space, objective, budget, seed, observers, resume, {"walked": 0.0}
        )

        def step(point: Point[S]) -> Point[S] | Stop:
            walked = point.memory["walked"]
            move = space.propose(point.current, task.rng) if walked < self.length else None
            if move is None:
                if walked == 0:
                    return "no legal move"
                start = task.start_measurement.value
                return move_to(task, point, task.start, start, {"walked": 0.0})
            candidate = space.apply(point.current, move)
            measurement = task.measure(candidate)
            memory = {"walked": walked + 1}
            return settle(task, point, move, candidate, measurement, True, memory)

        return run(task, point, step)
