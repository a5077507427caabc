"""nostall's default strategy: annealing that fits itself to the landscape and the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
from nostall.search.loop import Point, Task, begin, move_to, run, settle
from nostall.search.memo import Memo


@dataclass(frozen=True, kw_only=True)
class Anneal(Search):
    """Simulated annealing over all moves, in cycles that begin at the best state.

    Cost differences are compared with the running mean of their sizes, so neither the unit nor
    the size of typical gains needs tuning: the temperature is that mean times a factor that
    falls geometrically from ``hot`` to ``cold``.  It does so
    ``cycles`` times over the budget, each time from the best state so far, and each time from
    ``reheat`` times the heat before.  A step strings up to ``jump`` moves together, each further
    one with a probability that falls from ``string`` to 0 within a cycle.

    A modelled state is charged once: the last ``memo`` values are remembered.  After ``stuck``
    steps in a row that met only remembered states, the search is thrown a few moves away from the
    best state; when ``throws`` throws in a row lead to nothing new, the space is taken as
    exhausted and the search is finished.  A measured value is noise too, so measured states are
    evaluated at each visit.

    With a budget of evaluations the result is reproducible bit for bit.  With a budget of seconds
    only, the cooling follows the clock, and it is not.
    """

    name: ClassVar[str] = "anneal"

    hot: float = 0.03
    cold: float = 0.001
    cycles: int = 1
    reheat: float = 0.5
    jump: int = 1
    string: float = 0.5
    memo: int = 16384
    stuck: int = 100
    throws: int = 40

    def __post_init__(self) -> None:
        counts = (self.cycles, self.jump, self.stuck, self.throws)
        parts = 0 < self.reheat <= 1 and 0 <= self.string <= 1
        if not 0 < self.cold <= self.hot or not parts or min(counts) < 1 or self.memo < 0:
            raise BadInput(
                f"anneal got {self}; allowed are 0 < cold <= hot, 0 < reheat <= 1, "
                "0 <= string <= 1, memo >= 0, and cycles, jump, stuck and throws >= 1; leave out "
                "what you do not mean to change"
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
        """Anneal until the budget is spent or a modelled space is exhausted."""
        fresh = {"cycle": 0.0, "spread": 0.0, "seen": 0.0, "free": 0.0, "throws": 0.0}
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, fresh)
        memo = Memo(self.memo if objective.kind == "modelled" else 0)
        if resume is None:
            memo.note(0, memo.digest(space.key(task.start)), point.value)
        point = point._replace(memory=memo.restore(point.memory))

        def step(point: Point[S]) -> Point[S] | Stop:
            memo.catch_up(point.evaluations)
            if point.memory["free"] >= self.stuck:
                return self._throw(task, point, memo)
            part = task.progress(point.evaluations) * self.cycles
            cycle = min(int(part), self.cycles - 1)
            if cycle > point.memory["cycle"]:
                memory = {**point.memory, "cycle": float(cycle)}
                return move_to(task, point, point.best, point.best_measurement.value, memory)
            return self._step(task, point, memo, cycle, part - cycle)

        return run(task, point, step, lambda at: at.memory | memo.saved(at.evaluations))

    def _step(
        self, task: Task[S, M], point: Point[S], memo: Memo, cycle: int, part: float
    ) -> Point[S] | Stop:
        """Propose, look up or evaluate, accept by temperature; ``part`` of the cycle is over."""
        rng, memory = task.rng, point.memory
        moves = 1
        while moves < self.jump and float(rng.random()) < self.string * (1.0 - part):
            moves += 1
        candidate, path = wander(task.space, point.current, rng, moves)
        if not path:
            return _go_back(task, point)
        digest = memo.digest(task.space.key(candidate))
        value = memo.get(digest)
        measurement = None
        if value is None:
            measurement = task.measure(candidate)
            value = measurement.value
            memo.note(point.evaluations, digest, value)
        change = value - point.value
        heat = self.hot * self.reheat**cycle * (self.cold / self.hot) ** part
        temperature = heat * memory["spread"] / max(1.0, memory["seen"])
        accepted = change <= 0 or (
            temperature > 0 and float(rng.random()) < math.exp(-change / temperature)
        )
        if measurement is None:
            held = {**memory, "free": memory["free"] + 1}
            if accepted:
                return move_to(task, point, candidate, value, held)
            return move_to(task, point, point.current, point.value, held)
        held = {**memory, "free": 0.0, "throws": 0.0}
        if change != 0 and math.isfinite(change):
            held["spread"] += abs(change)
            held["seen"] += 1
        return settle(task, point, Path(path), candidate, measurement, accepted, held)

    def _throw(self, task: Task[S, M], point: Point[S], memo: Memo) -> Point[S] | Stop:
        """Go a few moves away from the best state, further with each throw in vain."""
        throws = point.memory["throws"]
        if throws >= self.throws:
            return "finished"
        candidate, path = wander(task.space, point.best, task.rng, 2 + int(throws))
        memory = {**point.memory, "free": 0.0, "throws": throws + 1}
        digest = memo.digest(task.space.key(candidate))
        value = memo.get(digest)
        if value is None:
            measurement = task.measure(candidate)
            memo.note(point.evaluations, digest, measurement.value)
            return settle(task, point, Path(path), candidate, measurement, True, memory)
        if math.isinf(value):
            candidate, value = point.best, point.best_measurement.value
        return move_to(task, point, candidate, value, memory)


class Path(tuple[object, ...]):
    """Several moves as one; prints as they do."""

    def __str__(self) -> str:
        return "; ".join(map(str, self))


def wander(space: Space[S, M], state: S, rng: np.random.Generator, moves: int) -> tuple[S, list[M]]:
    """Where up to ``moves`` uniform legal moves lead, and which they were."""
    path: list[M] = []
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is None:
            break
        state = space.apply(state, move)
        path.append(move)
    return state, path


def _go_back(task: Task[S, M], point: Point[S]) -> Point[S] | Stop:
    """Leave a state without legal moves for the start state."""
    if task.space.key(point.current) == task.space.key(task.start):
        return "no legal move"
    memory = {**point.memory, "free": point.memory["free"] + 1}
    return move_to(task, point, task.start, task.start_measurement.value, memory)
