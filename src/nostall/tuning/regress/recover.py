"""Search the input of the newer ptxas for the static properties of the older binary; no GPU."""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from nostall.core import Budget, LaunchSpec
from nostall.core.errors import BadBinary
from nostall.ptx.assemble.builder import Builder, BuildSpec
from nostall.ptx.assemble.pool import BuildPool
from nostall.ptx.schedule.state import PtxState
from nostall.search.evolution.operators import SIGMAS
from nostall.tuning.assembler.candidate import Candidate, build_state, hazards
from nostall.tuning.assembler.space import AssemblerSpace
from nostall.tuning.regress.losses import Loss, excess, is_recovered
from nostall.tuning.regress.properties import Properties, read_properties

T = TypeVar("T")

_COMBINED = 4
"""Best settings that are tried in pairs."""
_ORDERS_PER_WORKER = 4
"""Orders of a generation; the best of all is the parent of the next one."""
_MAX_EMPTY = 3
"""Batches without a new state after which the space counts as searched."""
_ENOUGH = 1e-9
"""Excess over the older binary at which nothing is left to find."""


@dataclass(frozen=True)
class Found:
    """A candidate whose PTX is proved equal and whose machine code passed the verifier."""

    candidate: Candidate
    properties: Properties


@dataclass
class Recovery:
    """Result of a search."""

    best: Found | None = None
    """None if no candidate comes nearer to the older binary than the newer one."""
    recovered: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    """Candidates by outcome; ``built`` ones were compared with the older binary."""
    seconds: float = 0.0
    stopped: str = "finished"


@dataclass(frozen=True)
class Goal:
    """What the search compares its candidates with."""

    older: Properties
    newer: Properties
    losses: tuple[Loss, ...]
    launch: LaunchSpec | None


def read_candidate(builder: Builder, argument: tuple[Candidate, LaunchSpec | None]) -> Found | None:
    """The properties of a candidate; None if its machine code cannot be read.  Runs in a worker."""
    candidate, launch = argument
    spilled = candidate.resources.spill_bytes if candidate.resources else None
    with suppress(BadBinary):
        kernel = builder.spec.kernel
        properties = read_properties(candidate.cubin, kernel, launch, spill_bytes=spilled)
        return Found(candidate, properties)
    return None


def recover(
    spec: BuildSpec, space: AssemblerSpace, goal: Goal, budget: Budget, seed: int = 0
) -> Recovery:
    """Settings one by one, the best ones in pairs, then orders near the best, until time is up.

    It ends as soon as a safe candidate has the losses no more.  Ctrl-C ends it with what it has.
    """
    result = Recovery()
    start = monotonic()
    deadline = start + budget.seconds if budget.seconds is not None else None
    limit = budget.evaluations
    pool: BuildPool[Candidate] = BuildPool(partial(Builder, spec), build_state, _all_cores())
    ranking = _Ranking(goal, spec.kernel)
    seen: set[PtxState] = {space.start()}
    try:
        with pool:
            empty = 0
            for batch in _batches(space, ranking, pool.workers, seed):
                new = [state for state in dict.fromkeys(batch) if state not in seen]
                if limit is not None:
                    new = new[: limit - len(seen) + 1]
                seen.update(new)
                _judge_all(pool, new, ranking, deadline, result)
                late = deadline is not None and monotonic() > deadline
                if late or (limit is not None and len(seen) > limit):
                    result.stopped = "time limit" if late else "limit of candidates"
                    break
                empty = 0 if new else empty + 1
                if ranking.is_done() or empty == _MAX_EMPTY:
                    break
    except KeyboardInterrupt:
        result.stopped = "interrupted"
    result.best = ranking.best()
    result.recovered = ranking.is_done()
    result.counts["unsafe"] = ranking.unsafe
    result.seconds = monotonic() - start
    return result


def _all_cores() -> int:
    """Workers; nothing is measured meanwhile."""
    return len(os.sched_getaffinity(0))


def _judge_all(
    pool: BuildPool[Candidate],
    states: Sequence[PtxState],
    ranking: _Ranking,
    deadline: float | None,
    result: Recovery,
) -> None:
    """Build the states, and compare those with other machine code than all before."""
    launch = ranking.goal.launch
    fresh = []
    for candidate in _in_order(pool, build_state, states, deadline):
        outcome: str = candidate.status
        if candidate.status == "built":
            outcome = "built" if ranking.is_new(candidate) else "duplicate or more spills"
        result.counts[outcome] += 1
        if outcome == "built":
            fresh.append((candidate, launch))
    for found in _in_order(pool, read_candidate, fresh, deadline):
        if found is not None:
            ranking.add(found)


def _in_order(
    pool: BuildPool[Candidate],
    task: Callable[[Any, Any], T],
    arguments: Sequence[Any],
    deadline: float | None,
) -> Iterator[T]:
    """Results of a task in the order of its arguments; none is begun after the deadline."""
    waiting = iter(arguments)
    futures = deque(pool.submit_task(task, a) for a in itertools.islice(waiting, pool.workers))
    while futures:
        yield futures.popleft().result()
        in_time = deadline is None or monotonic() < deadline
        if in_time and (argument := next(waiting, None)) is not None:
            futures.append(pool.submit_task(task, argument))


class _Ranking:
    """The candidates that come nearer to the older binary than the newer one, nearest first."""

    def __init__(self, goal: Goal, kernel: str) -> None:
        self.goal, self._kernel = goal, kernel
        self._sorted: list[tuple[float, int, Found]] = []
        self._number = itertools.count()
        self._verified: set[str] = set()
        self._codes: set[str] = set()
        self._start = excess(goal.older, goal.newer)
        self.unsafe = 0

    def is_new(self, candidate: Candidate) -> bool:
        """Whether its machine code is new, and does not spill more than the newer binary."""
        most, resources = self.goal.newer.spill_bytes, candidate.resources
        spills_more = most is not None and resources is not None and resources.spill_bytes > most
        is_known = candidate.code_sha256 in self._codes
        self._codes.add(candidate.code_sha256)
        return not (is_known or spills_more)

    def add(self, found: Found) -> None:
        value = excess(self.goal.older, found.properties)
        if value < self._start:
            self._sorted.append((value, next(self._number), found))
            self._sorted.sort(key=lambda entry: entry[:2])

    def states(self) -> list[PtxState]:
        """The states, best first."""
        return [found.candidate.state for _, _, found in self._sorted]

    def best(self) -> Found | None:
        """The best one that the verifier of machine code accepts."""
        while self._sorted:
            found = self._sorted[0][2]
            code = found.candidate.code_sha256
            if code in self._verified or not hazards(found.candidate.cubin, self._kernel):
                self._verified.add(code)
                return found
            self._sorted.pop(0)
            self.unsafe += 1
        return None

    def is_done(self) -> bool:
        """Whether a safe candidate has the losses no more."""
        if not self._sorted:
            return False
        goal, first = self.goal, self._sorted[0]
        if first[0] > _ENOUGH and not is_recovered(goal.losses, goal.older, first[2].properties):
            return False
        best = self.best()
        return best is not None and is_recovered(goal.losses, goal.older, best.properties)


def _batches(
    space: AssemblerSpace, ranking: _Ranking, workers: int, seed: int
) -> Iterator[Iterable[PtxState]]:
    """The states in the order in which they are tried; each batch sees the ranking so far."""
    yield [state for state in space.portfolio() if not state.hints]
    pairs = itertools.combinations(ranking.states()[:_COMBINED], 2)
    yield [state for a, b in pairs if (state := space.combine(a, b)) is not None]
    for generation in itertools.count():
        parent = next(iter(ranking.states()), space.start())
        yield [
            space.reorder(
                space.start() if child == 0 else parent,
                np.random.default_rng((seed, generation, child)),
                SIGMAS[(generation + child) % len(SIGMAS)],
            )
            for child in range(_ORDERS_PER_WORKER * workers)
        ]
