"""nostall's default strategy: simulated annealing that adapts to the landscape and the budget.

Cache of the values of evaluated states, so that a modelled state is evaluated only once.

Prefetching of proposals: the next candidates are drawn while a device evaluates the current one.

A proposal depends on the state that a step starts from and on the random generator. Both are known
in advance for either outcome of the step before, accepted or rejected. So the proposals for both
can be drawn early, and the next step takes the one that fits. The search is the same with and
without prefetching, only the time of the work differs.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

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
from nostall.search.loop import Point, Task, begin, move_to, record_trial, run

_PREFIX = "memo:"
"""Prefix of the cached values in a checkpoint's memory."""


class Memo:
    """The last ``limit`` values by digest of the state's key; with ``limit`` 0 an empty cache.

    Checkpoints contain the cache. Without it a resumed search would evaluate cached states again,
    and so differ from an uninterrupted one. For the same reason a new value enters the cache only
    when the search has taken the point that it belongs to: :meth:`note` holds the value back until
    :meth:`commit` is called with a later evaluation.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[str, float] = OrderedDict()
        self._pending: tuple[int, str, float] | None = None

    def digest(self, key: bytes) -> str:
        """The cache key of a state: a hash of 96 bits, so that long keys take no memory."""
        return hashlib.blake2b(key, digest_size=12).hexdigest() if self.limit else ""

    def get(self, digest: str) -> float | None:
        return self._values.get(digest)

    def note(self, index: int, digest: str, value: float) -> None:
        """Hold back the value of evaluation number ``index`` until it is committed."""
        if self.limit:
            self._pending = (index, digest, value)

    def commit(self, evaluations: int) -> None:
        """Cache the pending value if it is one of the first ``evaluations``; else drop it."""
        if self._pending is None:
            return
        index, digest, value = self._pending
        if index < evaluations:
            self._values[digest] = value
            while len(self._values) > self.limit:
                self._values.popitem(last=False)
        self._pending = None

    def dump(self, evaluations: int) -> dict[str, float]:
        """Commit, and return the values as entries of a checkpoint's memory, oldest first."""
        self.commit(evaluations)
        return {_PREFIX + digest: value for digest, value in self._values.items()}

    def load(self, memory: Mapping[str, float]) -> dict[str, float]:
        """Take the values out of a checkpoint's memory; returns the other entries."""
        for name, value in memory.items():
            if name.startswith(_PREFIX) and self.limit:
                self._values[name.removeprefix(_PREFIX)] = value
        return {name: value for name, value in memory.items() if not name.startswith(_PREFIX)}


Draw = Callable[[Space[S, M], S, np.random.Generator], "M | None"]
"""Draws a legal move from a state; None if there is none."""


@dataclass(frozen=True, slots=True)
class _Prefetched(Generic[S, M]):
    """A proposal from ``state``, with the generator's state before and after the draw."""

    state: S
    rng_before: Mapping[str, Any]
    move: M
    candidate: S
    rng_after: Mapping[str, Any]


class ProposalPrefetcher(Generic[S, M]):
    """Draws proposals of ``space`` with ``draw``, in advance if :meth:`prefetch` is called."""

    def __init__(self, space: Space[S, M], draw: Draw[S, M]) -> None:
        self.space, self.draw = space, draw
        self._rng = np.random.default_rng(0)
        self._prefetched: list[_Prefetched[S, M]] = []

    def propose(self, state: S, rng: np.random.Generator) -> tuple[M, S] | None:
        """A legal move and the state it leads to; None if no move is legal."""
        prefetched, self._prefetched = self._prefetched, []
        rng_now = rng.bit_generator.state if prefetched else {}
        for proposal in prefetched:
            if proposal.state is state and proposal.rng_before == rng_now:
                rng.bit_generator.state = proposal.rng_after
                return proposal.move, proposal.candidate
        move = self.draw(self.space, state, rng)
        return None if move is None else (move, self.space.apply(state, move))

    def prefetch(self, states: Iterable[S], rng: np.random.Generator) -> Iterator[S]:
        """Draw what :meth:`propose` will draw from each of ``states`` with ``rng`` as it is now.

        Yields the candidates one at a time and leaves ``rng`` unchanged.
        """
        before = rng.bit_generator.state
        for state in states:
            self._rng.bit_generator.state = before
            move = self.draw(self.space, state, self._rng)
            if move is not None:
                candidate = self.space.apply(state, move)
                after = self._rng.bit_generator.state
                self._prefetched.append(_Prefetched(state, before, move, candidate, after))
                yield candidate


# Phases of a search. The numbers are part of the checkpoint format.
EXPLORE_FROM_BEST = 0
EXPLORE_FROM_START = 1
COOL = 2
REHEAT = 3  # interrupts the cooling

# Keys of a checkpoint's memory.
_PHASE = "phase"
_STEPS = "steps"  # steps of the current phase or walk
_IMPROVED_AT = "improved_at"  # evaluations at the last improvement, or at the start of the phase
_CHANGE_SUM = "change_sum"  # sum of the sizes of all cost differences
_CHANGE_COUNT = "change_count"  # number of cost differences in the sum
_CACHED_STEPS = "cached_steps"  # steps since the last evaluation
_PERTURBATIONS = "perturbations"  # perturbations since the last evaluation
_EXPLORES = "explores"  # 1 if the search has exploration phases, 0 if not, -1 if not decided yet
_ACCEPTANCE = "acceptance"  # running mean of the share of accepted steps (measured objectives)

_SIP_MOVES: Tags = frozenset(("memory", "slide", "distance=1"))
_MEMORY_MOVES: Tags = frozenset(("memory",))
_ACCEPTANCE_WEIGHT = 0.1
"""Weight of the last step in the running mean of accepted steps."""
_FROM_BEST_SHARE = 0.3
"""Share of the exploration that starts from the best state."""
_FROM_BEST_STEPS = 200
_REHEAT_STEPS = 400
_ATTEMPTS = 20
"""Draws of a move with certain tags before any legal move is taken."""


@dataclass(frozen=True, kw_only=True)
class Anneal(Search):
    """Simulated annealing that explores first, then cools from the best state.

    If values are exact (modelled) and the space has moves of memory instructions, the first part
    of the budget explores and accepts each move: first long walks from the best state with single
    slides of memory instructions (SIP's moves), then short walks from the start state, half of
    their moves of memory instructions, half any. The rest of the budget is annealing over all
    moves, again half of them of memory instructions. Whenever annealing brings no improvement for
    a while, a long walk from the best state follows. For measured values, and for other spaces, the
    whole budget is annealing over all moves: far from the start, candidates look faster more often
    by noise than because they are.

    Cost differences are divided by the running mean of their sizes, so neither the unit nor the
    size of typical gains needs tuning. The temperature falls geometrically.

    A modelled state is evaluated once. After many steps in a row that met only cached states, the
    search is perturbed: it moves a few steps away from the best state. When many perturbations in
    a row lead to no new state, the space counts as exhausted and the search is finished. A
    measured value has noise, so a measured state is evaluated at each visit.

    With a budget of evaluations the result is reproducible bit for bit. With a budget of seconds
    alone the phases follow the clock, so it is not.
    """

    name: ClassVar[str] = "anneal"

    start_temperature: float = 0.03
    """In units of the mean size of cost differences."""
    end_temperature: float = 0.001
    """In units of the mean size of cost differences."""
    exploration: float = 0.6
    """Share of the budget that explores."""
    walk_length: int = 64
    """Steps of a walk from the start state."""
    reheat_after: int = 300
    """Evaluations without an improvement after which a long walk interrupts the cooling."""
    memo_size: int = 16384
    """Number of cached values; the oldest are dropped."""
    perturb_after: int = 100
    """Steps in a row to cached states after which the search is perturbed."""
    max_perturbations: int = 40
    """Perturbations in a row without a new state after which the search is finished."""

    def __post_init__(self) -> None:
        counts = (self.walk_length, self.reheat_after, self.perturb_after, self.max_perturbations)
        cools = 0 < self.end_temperature <= self.start_temperature and 0 <= self.exploration < 1
        if not cools or min(counts) < 1 or self.memo_size < 0:
            raise BadInput(
                f"anneal got {self}; allowed are 0 < end_temperature <= start_temperature, "
                "0 <= exploration < 1, memo_size >= 0, and walk_length, reheat_after, "
                "perturb_after and max_perturbations >= 1; leave out those that you do not want to "
                "change"
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
        task, point = begin(
            self.name, space, objective, budget, seed, observers, resume, _first_memory()
        )
        memo = Memo(self.memo_size if objective.kind == "modelled" else 0)
        if resume is None:
            memo.note(0, memo.digest(space.key(task.start)), point.value)
        point = point._replace(memory=memo.load(point.memory))
        prefetcher = _prefetcher(space) if objective.kind == "measured" else None

        def step(point: Point[S]) -> Point[S] | Stop:
            memo.commit(point.evaluations)
            if point.memory[_EXPLORES] < 0:
                return self._decide_exploration(task, point)
            if point.memory[_CACHED_STEPS] >= self.perturb_after:
                return self._perturb(task, point, memo)
            exploration = self.exploration * point.memory[_EXPLORES]
            phase, part = self._phase(task, point, exploration)
            limits = {EXPLORE_FROM_BEST: _FROM_BEST_STEPS, EXPLORE_FROM_START: self.walk_length}
            if phase != point.memory[_PHASE] or point.memory[_STEPS] >= limits.get(phase, math.inf):
                return _begin_phase(task, point, phase)
            prefers_memory = exploration and float(task.rng.random()) < 0.5
            temperature = self._temperature(part) if phase == COOL else math.inf
            if prefetcher is not None:
                proposal = prefetcher.propose(point.current, task.rng)
                if proposal is None:
                    return _return_to_start(task, point)
                return _measured_step(task, point, prefetcher, *proposal, temperature)
            if phase in (EXPLORE_FROM_BEST, REHEAT):
                tags = _SIP_MOVES
            else:
                tags = _MEMORY_MOVES if prefers_memory else NO_TAGS
            move = _draw(space, point.current, task.rng, tags)
            if move is None:
                return _return_to_start(task, point)
            return _step(task, point, memo, move, temperature)

        return run(task, point, step, lambda at: at.memory | memo.dump(at.evaluations))

    def _decide_exploration(self, task: Task[S, M], point: Point[S]) -> Point[S]:
        """Decide whether the search explores, which depends on the objective and the space."""
        explores = (
            self.exploration > 0
            and task.objective.kind == "modelled"
            and _has_moves(task.space, task.start, _MEMORY_MOVES)
        )
        memory = {**point.memory, _EXPLORES: float(explores)}
        return move_to(task, point, point.current, point.value, memory)

    def _phase(self, task: Task[S, M], point: Point[S], exploration: float) -> tuple[int, float]:
        """The phase of the next step, and the part of the phase that is over, 0 to 1."""
        phase, part = _scheduled_phase(task.progress(point.evaluations), exploration)
        if phase == COOL and exploration:
            phase = self._cool_or_reheat(point)
        return phase, part

    def _cool_or_reheat(self, point: Point[S]) -> int:
        phase = point.memory[_PHASE]
        if phase == REHEAT:
            return REHEAT if point.memory[_STEPS] < _REHEAT_STEPS else COOL
        idle = point.evaluations - point.memory[_IMPROVED_AT]
        return REHEAT if phase == COOL and idle >= self.reheat_after else COOL

    def _temperature(self, part: float) -> float:
        ratio = self.end_temperature / self.start_temperature
        return float(self.start_temperature * ratio**part)

    def _perturb(self, task: Task[S, M], point: Point[S], memo: Memo) -> Point[S] | Stop:
        """Move a few steps away from the best state, one more with each perturbation in a row."""
        perturbations = point.memory[_PERTURBATIONS]
        if perturbations >= self.max_perturbations:
            return "finished"
        candidate, path = take_random_moves(
            task.space, point.best, task.rng, 2 + int(perturbations)
        )
        memory = {**point.memory, _CACHED_STEPS: 0.0, _PERTURBATIONS: perturbations + 1}
        digest = memo.digest(task.space.key(candidate))
        value = memo.get(digest)
        if value is None:
            measurement = task.measure(candidate)
            memo.note(point.evaluations, digest, measurement.value)
            return record_trial(task, point, Path(path), candidate, measurement, True, memory)
        if math.isinf(value):
            candidate, value = point.best, point.best_measurement.value
        return move_to(task, point, candidate, value, memory)


def _first_memory() -> dict[str, float]:
    counts = (
        _PHASE,
        _STEPS,
        _IMPROVED_AT,
        _CHANGE_SUM,
        _CHANGE_COUNT,
        _CACHED_STEPS,
        _PERTURBATIONS,
    )
    return dict.fromkeys(counts, 0.0) | {_EXPLORES: -1.0, _ACCEPTANCE: 1.0}


def _prefetcher(space: Space[S, M]) -> ProposalPrefetcher[S, M]:
    return ProposalPrefetcher(space, lambda space, state, rng: space.propose(state, rng))


def _begin_phase(task: Task[S, M], point: Point[S], phase: int) -> Point[S]:
    """Begin a phase, or the next walk of an exploration phase, at its first state."""
    begun = {_PHASE: float(phase), _STEPS: 0.0, _IMPROVED_AT: float(point.evaluations)}
    memory = {**point.memory, **begun}
    if phase == EXPLORE_FROM_START:
        return move_to(task, point, task.start, task.start_measurement.value, memory)
    return move_to(task, point, point.best, point.best_measurement.value, memory)


def _step(task: Task[S, M], point: Point[S], memo: Memo, move: M, temperature: float) -> Point[S]:
    """Look up or evaluate the state after ``move``, and accept it by the temperature."""
    memory = {**point.memory, _STEPS: point.memory[_STEPS] + 1}
    candidate = task.space.apply(point.current, move)
    digest = memo.digest(task.space.key(candidate))
    value = memo.get(digest)
    measurement = None
    if value is None:
        measurement = task.measure(candidate)
        value = measurement.value
        memo.note(point.evaluations, digest, value)
    change = value - point.value
    accepted = change <= 0 or _accepts_loss(change, temperature, memory, task.rng.random)
    if measurement is None:
        memory[_CACHED_STEPS] += 1
        if accepted:
            return move_to(task, point, candidate, value, memory)
        return move_to(task, point, point.current, point.value, memory)
    if value < point.best_measurement.value:
        memory[_IMPROVED_AT] = float(point.evaluations)
    memory = _with_change(memory, change)
    return record_trial(task, point, move, candidate, measurement, accepted, memory)


def _measured_step(
    task: Task[S, M],
    point: Point[S],
    prefetcher: ProposalPrefetcher[S, M],
    move: M,
    candidate: S,
    temperature: float,
) -> Point[S]:
    """Measure ``candidate``, and accept it by the temperature.

    The random number of the decision is drawn before the measurement. So the generator is in the
    same state for either outcome, and the next proposals can be drawn while the device is busy:
    first those of the more frequent outcome, because a GPU has time to prepare one of them.
    """
    random_number = float(task.rng.random())
    acceptance = point.memory.get(_ACCEPTANCE, 1.0)
    outcomes = (candidate, point.current) if acceptance > 0.5 else (point.current, candidate)
    proposals = prefetcher.prefetch(outcomes, task.rng)
    measurement = task.measure_with_prefetch(candidate, proposals)
    memory = {**point.memory, _STEPS: point.memory[_STEPS] + 1}
    change = measurement.value - point.value
    accepted = change <= 0 or _accepts_loss(change, temperature, memory, lambda: random_number)
    memory[_ACCEPTANCE] = acceptance + _ACCEPTANCE_WEIGHT * (accepted - acceptance)
    memory = _with_change(memory, change)
    return record_trial(task, point, move, candidate, measurement, accepted, memory)


def _with_change(memory: dict[str, float], change: float) -> dict[str, float]:
    """The memory after an evaluation whose cost differs by ``change`` from the current state's."""
    updated = {**memory, _CACHED_STEPS: 0.0, _PERTURBATIONS: 0.0}
    if change != 0 and math.isfinite(change):
        updated[_CHANGE_SUM] += abs(change)
        updated[_CHANGE_COUNT] += 1
    return updated


def _accepts_loss(
    change: float,
    temperature: float,
    memory: Mapping[str, float],
    random_number: Callable[[], float],
) -> bool:
    """Whether to accept a higher cost, by the Metropolis criterion.

    ``temperature`` is in units of the mean cost difference. At an infinite temperature each
    finite cost is accepted.
    """
    if math.isinf(temperature) or math.isinf(change):
        return not math.isinf(change)
    scaled = temperature * memory[_CHANGE_SUM] / max(1.0, memory[_CHANGE_COUNT])
    return scaled > 0 and float(random_number()) < math.exp(-change / scaled)


def _scheduled_phase(progress: float, exploration: float) -> tuple[int, float]:
    """The phase at this part of the budget, and the part of the phase that is over."""
    if progress >= exploration:
        return COOL, (progress - exploration) / (1.0 - exploration)
    from_best = exploration * _FROM_BEST_SHARE
    if progress < from_best:
        return EXPLORE_FROM_BEST, progress / from_best
    return EXPLORE_FROM_START, (progress - from_best) / (exploration - from_best)


def _has_moves(space: Space[S, M], state: S, tags: Tags) -> bool:
    """Whether draws give legal moves with these tags.

    Uses its own generator, so the draws of the search do not depend on this check.
    """
    rng = np.random.default_rng(0)
    return any(space.draw(state, rng, tags) is not None for _ in range(space.max_draws))


def _draw(space: Space[S, M], state: S, rng: np.random.Generator, tags: Tags) -> M | None:
    """A legal move with these tags; after some attempts any legal move, None if there is none."""
    for _ in range(_ATTEMPTS if tags else 0):
        move = space.draw(state, rng, tags)
        if move is not None:
            return move
    return space.propose(state, rng)


class Path(tuple[object, ...]):
    """Several moves that count as one; its text is that of the moves."""

    def __str__(self) -> str:
        return "; ".join(map(str, self))


def take_random_moves(
    space: Space[S, M], state: S, rng: np.random.Generator, moves: int
) -> tuple[S, list[M]]:
    """Take up to ``moves`` uniform legal moves; returns the last state and the moves."""
    path: list[M] = []
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is None:
            break
        state = space.apply(state, move)
        path.append(move)
    return state, path


def _return_to_start(task: Task[S, M], point: Point[S]) -> Point[S] | Stop:
    """Leave a state without legal moves for the start state."""
    if task.space.key(point.current) == task.space.key(task.start):
        return "no legal move"
    memory = {**point.memory, _CACHED_STEPS: point.memory[_CACHED_STEPS] + 1}
    return move_to(task, point, task.start, task.start_measurement.value, memory)
