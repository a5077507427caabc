"""Search the input of the newer ptxas for the static properties of the older binary; no GPU."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from nostall.core import Budget, LaunchSpec
from nostall.core.errors import BadBinary
from nostall.ptx.assemble.builder import Builder, BuildSpec
from nostall.ptx.assemble.pool import BuildPool
from nostall.ptx.schedule.state import PtxState
from nostall.search.orders.operators import SIGMAS
from nostall.tuning.assembler.candidate import Candidate, build_state, hazards
from nostall.tuning.assembler.space import AssemblerSpace
from nostall.tuning.regress.losses import Loss, excess, is_recovered
from nostall.tuning.regress.properties import Properties, read_properties

INTERRUPTED = "interrupted"
"""Why a search stopped that Ctrl-C ended."""
_COMBINED = 4
"""Best settings that are tried in pairs."""
_ORDERS = 8
"""Orders of a generation; they are near the best states so far, and near the original."""
_PARENTS = 3
_MAX_EMPTY = 3
"""Batches without a new state after which the space counts as searched."""


@dataclass(frozen=True)
class Goal:
    """What the search compares its candidates with."""

    older: Properties
    newer: Properties
    losses: tuple[Loss, ...]
    launch: LaunchSpec | None


@dataclass(frozen=True)
class Found:
    """A candidate whose PTX is proved equal."""

    candidate: Candidate
    properties: Properties


@dataclass
class Recovery:
    """Result of a search."""

    best: Found | None = None
    """Accepted by the verifier of machine code; None if no candidate comes nearer to the older
    binary than the newer one."""
    recovered: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    """Candidates by outcome; ``built`` ones were compared with the older binary."""
    seconds: float = 0.0
    stopped: str = "finished"


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

    It ends as soon as a safe candidate has recovered the losses (:func:`is_recovered`).  Ctrl-C
    ends it with what it has.
    """
    start, result, ranking = monotonic(), Recovery(), _Ranking(goal, spec.kernel)
    deadline = start + budget.seconds if budget.seconds is not None else float("inf")
    left = budget.evaluations
    seen: set[PtxState] = {space.start()}
    empty = 0
    workers = len(os.sched_getaffinity(0))  # nothing is measured meanwhile
    pool: BuildPool[Candidate] = BuildPool(partial(Builder, spec), build_state, workers)
    try:
        with pool:
            for batch in _batches(space, ranking, seed):
                new = [state for state in dict.fromkeys(batch) if state not in seen][:left]
                seen.update(new)
                left = None if left is None else left - len(new)
                empty = 0 if new else empty + 1
                _judge(partial(_run_all, pool, deadline), new, ranking, result.counts)
                if monotonic() > deadline:
                    result.stopped = "time limit"
                elif left == 0:
                    result.stopped = "limit of candidates"
                if result.stopped != "finished" or empty == _MAX_EMPTY or ranking.is_done():
                    break
    except KeyboardInterrupt:
        result.stopped = INTERRUPTED
    result.best, result.recovered = ranking.best(), ranking.is_done()
    result.counts["unsafe"] = ranking.unsafe
    result.seconds = monotonic() - start
    return result


def _judge(
    run_all: Callable[[Any, Sequence[Any]], Iterator[Any]],
    states: Sequence[PtxState],
    ranking: _Ranking,
    counts: Counter[str],
) -> None:
    """Build the states, and rank those with other machine code than all before."""
    fresh = []
    for candidate in run_all(build_state, states):
        is_new = candidate.status != "built" or ranking.is_new(candidate)
        counts[candidate.status if is_new else "duplicate"] += 1
        if candidate.status == "built" and is_new:
            fresh.append((candidate, ranking.goal.launch))
    for found in run_all(read_candidate, fresh):
        if found is not None:
            ranking.add(found)


def _run_all(
    pool: BuildPool[Candidate], deadline: float, task: Any, arguments: Sequence[Any]
) -> Iterator[Any]:
    """Results of a task in the order of its arguments, as long as there is time."""
    futures = [pool.submit_task(task, argument) for argument in arguments]
    for future in futures:
        if monotonic() > deadline:
            future.cancel()
        else:
            yield future.result()


class _Ranking:
    """The candidates: those without the losses first, then the nearest to the older binary."""

    def __init__(self, goal: Goal, kernel: str) -> None:
        self.goal, self._kernel = goal, kernel
        self._sorted: list[tuple[bool, float, int, Found]] = []
        self._number = itertools.count()
        self._verified: set[str] = set()
        self._codes: set[str] = set()
        self._start = excess(goal.older, goal.newer)
        self.unsafe = 0

    def is_new(self, candidate: Candidate) -> bool:
        """Whether its machine code is new."""
        is_known = candidate.code_sha256 in self._codes
        self._codes.add(candidate.code_sha256)
        return not is_known

    def add(self, found: Found) -> None:
        goal = self.goal
        has_losses = not is_recovered(goal.losses, goal.older, found.properties)
        value = excess(goal.older, found.properties)
        self._sorted.append((has_losses, value, next(self._number), found))
        self._sorted.sort(key=lambda entry: entry[:3])

    def states(self) -> list[PtxState]:
        """The states, best first; they may be no better than the newer binary."""
        return [entry[3].candidate.state for entry in self._sorted]

    def best(self) -> Found | None:
        """The best one that the verifier of machine code accepts, if it is better than the newer
        binary."""
        while self._sorted and self._sorted[0][1] < self._start:
            found = self._sorted[0][3]
            code = found.candidate.code_sha256
            if code in self._verified or not hazards(found.candidate.cubin, self._kernel):
                self._verified.add(code)
                return found
            self._sorted.pop(0)
            self.unsafe += 1
        return None

    def is_done(self) -> bool:
        """Whether a safe candidate has recovered the losses."""
        while self._sorted and not self._sorted[0][0]:
            best = self.best()
            if best is None or best is self._sorted[0][3]:
                return best is not None
        return False


def _batches(space: AssemblerSpace, ranking: _Ranking, seed: int) -> Iterator[Iterable[PtxState]]:
    """The states in the order in which they are tried; each batch sees the ranking so far."""
    yield [state for state in space.portfolio() if not state.hints]
    pairs = itertools.combinations(ranking.states()[:_COMBINED], 2)
    yield [state for a, b in pairs if (state := space.combine(a, b)) is not None]
    for generation in itertools.count():
        parents = [*ranking.states()[:_PARENTS], space.start()]
        yield [
            space.reorder(
                parents[child % len(parents)],
                np.random.default_rng((seed, generation, child)),
                SIGMAS[(generation + child) % len(SIGMAS)],
            )
            for child in range(_ORDERS)
        ]
