"""nostall's default strategy: annealing that fits itself to the landscape and the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from nostall.core.space import NO_TAGS, M, S, Tags
from nostall.search.loop import Point, Task, begin, move_to, run, settle
from nostall.search.memo import Memo
from nostall.search.prefetch import Ahead

DRIFT, STROLL, COOL, AGAIN = 0, 1, 2, 3
"""The phases of a search, in this order; ``AGAIN`` interrupts the cooling."""

_NEARBY: Tags = frozenset(("memory", "slide", "distance=1"))
_FAVOURED: Tags = frozenset(("memory",))
_OF_LATE = 0.1
"""Weight of the last step in the share of steps that were accepted of late."""
_DRIFT_SHARE = 0.3
_DRIFT_STEPS = 200
_AGAIN_STEPS = 400
_ATTEMPTS = 20


@dataclass(frozen=True, kw_only=True)
class Anneal(Search):
    """Simulated annealing that looks around first, then cools from the best that it saw.

    Where values are exact (modelled) and a space has moves of memory instructions, the first
    ``opening`` of the budget explores and accepts everything: long walks of single slides of memory
    instructions (SIP's moves), each from the best so far, then walks of ``walk`` steps from the
    start, half of them moves of memory instructions, half any.  The rest is annealing over all
    moves (again half of them of memory instructions); whenever it brings nothing better for
    ``idle`` evaluations, a long walk from the best comes between.  Elsewhere all of the budget is
    annealing over all moves: far from the start, noise finds more winners than speed does.

    Cost differences are compared with the running mean of their sizes, so neither the unit nor the
    size of typical gains needs tuning: the temperature is that mean times a factor that falls
    geometrically from ``hot`` to ``cold``.

    A modelled state is charged once: the last ``memo`` values are remembered.  After ``stuck``
    steps in a row that met only remembered states, the search is thrown a few moves away from the
    best state; when ``throws`` throws in a row lead to nothing new, the space is taken as
    exhausted and the search is finished.  A measured value is noise too, so measured states are
    evaluated at each visit.

    With a budget of evaluations the result is reproducible bit for bit.  With a budget of seconds
    only, the phases follow the clock, and it is not.
    """

    name: ClassVar[str] = "anneal"

    hot: float = 0.03
    cold: float = 0.001
    opening: float = 0.6
    walk: int = 64
    idle: int = 300
    memo: int = 16384
    stuck: int = 100
    throws: int = 40

    def __post_init__(self) -> None:
        counts = (self.walk, self.idle, self.stuck, self.throws)
        cools = 0 < self.cold <= self.hot and 0 <= self.opening < 1
        if not cools or min(counts) < 1 or self.memo < 0:
            raise BadInput(
                f"anneal got {self}; allowed are 0 < cold <= hot, 0 <= opening < 1, memo >= 0, "
                "and walk, idle, stuck and throws >= 1; leave out what you do not mean to change"
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
        counts = ("phase", "walked", "gained", "spread", "seen", "free", "throws")
        fresh = dict.fromkeys(counts, 0.0) | {"favours": -1.0, "accepts": 1.0}
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, fresh)
        memo = Memo(self.memo if objective.kind == "modelled" else 0)
        if resume is None:
            memo.note(0, memo.digest(space.key(task.start)), point.value)
        point = point._replace(memory=memo.restore(point.memory))
        looks = self.opening > 0 and objective.kind == "modelled"
        early = objective.kind == "measured"
        ahead = Ahead(space, lambda at, state, rng: at.propose(state, rng)) if early else None

        def step(point: Point[S]) -> Point[S] | Stop:
            memo.catch_up(point.evaluations)
            if point.memory["favours"] < 0:
                favours = float(looks and _offers(space, task.start, _FAVOURED))
                memory = {**point.memory, "favours": favours}
                return move_to(task, point, point.current, point.value, memory)
            if point.memory["free"] >= self.stuck:
                return self._throw(task, point, memo)
            opening = self.opening * point.memory["favours"]
            phase, part = _phase(task.progress(point.evaluations), opening)
            if phase == COOL and opening:
                phase = self._cooling(point)
            limit = {DRIFT: _DRIFT_STEPS, STROLL: self.walk}.get(phase, math.inf)
            if phase != point.memory["phase"] or point.memory["walked"] >= limit:
                begun = {"phase": float(phase), "walked": 0.0, "gained": float(point.evaluations)}
                memory = {**point.memory, **begun}
                if phase == STROLL:
                    start = task.start_measurement.value
                    return move_to(task, point, task.start, start, memory)
                return move_to(task, point, point.best, point.best_measurement.value, memory)
            wanted = _FAVOURED if opening and float(task.rng.random()) < 0.5 else NO_TAGS
            heat = self.hot * (self.cold / self.hot) ** part if phase == COOL else math.inf
            if ahead is not None:
                proposed = ahead.propose(point.current, task.rng)
                if proposed is None:
                    return _go_back(task, point)
                return _measured_step(task, point, ahead, *proposed, heat)
            wanted = _NEARBY if phase in (DRIFT, AGAIN) else wanted
            move = _draw(space, point.current, task.rng, wanted)
            if move is None:
                return _go_back(task, point)
            return _step(task, point, memo, move, heat)

        return run(task, point, step, lambda at: at.memory | memo.saved(at.evaluations))

    def _cooling(self, point: Point[S]) -> int:
        """Whether the cooling goes on, or a long walk comes between."""
        now = point.memory["phase"]
        if now == AGAIN:
            return AGAIN if point.memory["walked"] < _AGAIN_STEPS else COOL
        idle = point.evaluations - point.memory["gained"]
        return AGAIN if now == COOL and idle >= self.idle else COOL

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


def _step(task: Task[S, M], point: Point[S], memo: Memo, move: M, heat: float) -> Point[S]:
    """Look up or evaluate the state after ``move``; accept it by temperature."""
    memory = {**point.memory, "walked": point.memory["walked"] + 1}
    candidate = task.space.apply(point.current, move)
    digest = memo.digest(task.space.key(candidate))
    value = memo.get(digest)
    measurement = None
    if value is None:
        measurement = task.measure(candidate)
        value = measurement.value
        memo.note(point.evaluations, digest, value)
    change = value - point.value
    accepted = change <= 0 or _tolerated(change, heat, memory, task.rng.random)
    if measurement is None:
        held = {**memory, "free": memory["free"] + 1}
        if accepted:
            return move_to(task, point, candidate, value, held)
        return move_to(task, point, point.current, point.value, held)
    if value < point.best_measurement.value:
        memory["gained"] = float(point.evaluations)
    return settle(task, point, move, candidate, measurement, accepted, _learnt(memory, change))


def _measured_step(
    task: Task[S, M], point: Point[S], ahead: Ahead[S, M], move: M, candidate: S, heat: float
) -> Point[S]:
    """Measure ``candidate``; accept it by temperature.

    Chance is asked first, so that the generator stands at the same place however this ends, and the
    next proposals can be drawn while the device is busy: first from where steps ended of late,
    because a GPU has time to prepare one of them.
    """
    chance = float(task.rng.random())
    accepts = point.memory.get("accepts", 1.0)
    ends = (candidate, point.current) if accepts > 0.5 else (point.current, candidate)
    measurement = task.measure_ahead(candidate, ahead.look(ends, task.rng))
    memory = {**point.memory, "walked": point.memory["walked"] + 1}
    change = measurement.value - point.value
    accepted = change <= 0 or _tolerated(change, heat, memory, lambda: chance)
    memory["accepts"] = accepts + _OF_LATE * (accepted - accepts)
    return settle(task, point, move, candidate, measurement, accepted, _learnt(memory, change))


def _learnt(memory: dict[str, float], change: float) -> dict[str, float]:
    """The memory after a state was evaluated that costs ``change`` more."""
    held = {**memory, "free": 0.0, "throws": 0.0}
    if change != 0 and math.isfinite(change):
        held["spread"] += abs(change)
        held["seen"] += 1
    return held


def _tolerated(
    change: float, heat: float, memory: Mapping[str, float], chance: Callable[[], float]
) -> bool:
    """Whether to accept a change for the worse; ``heat`` is the temperature in mean changes."""
    if math.isinf(heat) or math.isinf(change):
        return not math.isinf(change)
    temperature = heat * memory["spread"] / max(1.0, memory["seen"])
    return temperature > 0 and float(chance()) < math.exp(-change / temperature)


def _phase(progress: float, opening: float) -> tuple[int, float]:
    """The phase at this part of the budget, and the part of it that is over."""
    if progress >= opening:
        return COOL, (progress - opening) / (1.0 - opening)
    drift = opening * _DRIFT_SHARE
    if progress < drift:
        return DRIFT, progress / drift
    return STROLL, (progress - drift) / (opening - drift)


def _offers(space: Space[S, M], state: S, wanted: Tags) -> bool:
    """Whether moves with these tags come up at all; a generator of its own, so that the search
    draws the same with and without asking."""
    rng = np.random.default_rng(0)
    return any(space.draw(state, rng, wanted) is not None for _ in range(space.max_draws))


def _draw(space: Space[S, M], state: S, rng: np.random.Generator, wanted: Tags) -> M | None:
    """A move with these tags, or any legal one when none comes up soon."""
    for _ in range(_ATTEMPTS if wanted else 0):
        move = space.draw(state, rng, wanted)
        if move is not None:
            return move
    return space.propose(state, rng)


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
