"""Search over random orders: a portfolio first, then orders of the start and of good settings.

The values of the portfolio, and the population of the best states with all their measured values,
are in the checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any, ClassVar, Generic

import numpy as np

from nostall.core import (
    BadInput,
    Budget,
    Checkpoint,
    Measurement,
    Objective,
    Observer,
    Search,
    SearchResult,
    Space,
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.search.loop import Point, Task, begin, move_to, record_trial, run
from nostall.search.orders.operators import (
    GIVEN,
    MOVE_COUNTS,
    Operator,
    PortfolioSpace,
    Proposal,
    ReorderSpace,
)
from nostall.search.orders.pipeline import Finished, Pipeline, Sequential

MISSING_VALUE = 1e300
"""Value of a state that was dropped or failed; a checkpoint is JSON, which has no infinity."""
_HELPS = 0.998
"""Part of the start's value below which a state helps."""
_PAIRED = 6
"""States whose pairs are tried."""


def value_key(number: int) -> str:
    """Key of a checkpoint's memory for state ``number`` of the portfolio and its pairs."""
    return f"given{number:04}"


def portfolio_pairs(
    space: Space[S, M], memory: Mapping[str, float], start_value: float
) -> tuple[S, ...]:
    """Pairs of the states of the portfolio that help most; empty before all have a value."""
    if not isinstance(space, PortfolioSpace):
        return ()
    singles = space.portfolio()
    values = [(memory.get(value_key(n)), n) for n in range(len(singles))]
    known = sorted((value, n) for value, n in values if value is not None)
    if len(known) < len(singles):
        return ()
    helpful = [singles[n] for value, n in known[:_PAIRED] if value < _HELPS * start_value]
    pairs = (space.combine(a, b) for a, b in combinations(helpful, 2))
    return tuple(pair for pair in pairs if pair is not None)


def portfolio_values(
    space: Space[S, M], memory: Mapping[str, float], start_value: float
) -> Iterator[tuple[S, float]]:
    """The states of the portfolio and their pairs, with the values that the search found."""
    if not isinstance(space, PortfolioSpace):
        return
    states = (*space.portfolio(), *portfolio_pairs(space, memory, start_value))
    for number, state in enumerate(states):
        if value_key(number) in memory:
            yield state, memory[value_key(number)]


@dataclass(frozen=True, slots=True)
class Member(Generic[S]):
    """A state with its values.

    The first value selected the state among many, so it is lucky more often than not.  It counts
    only until there are others.
    """

    state: S
    key: bytes
    values: tuple[float, ...]
    """One value for each measurement, in order."""

    @property
    def value(self) -> float:
        """Median of the values after the first, or the only value; infinity after a failure."""
        if math.inf in self.values:
            return math.inf
        return median(self.values[1:] or self.values)

    def measured(self, value: float) -> Member[S]:
        """The member after one more measurement."""
        return replace(self, values=(*self.values, value))


@dataclass(frozen=True, slots=True)
class Population(Generic[S]):
    """At most ``size`` members, the smallest value first; immutable."""

    size: int
    members: tuple[Member[S], ...] = ()

    def __iter__(self) -> Iterator[Member[S]]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def threshold(self) -> float:
        """Value below which a state enters; infinity while there is room."""
        return self.members[-1].value if len(self.members) >= self.size else math.inf

    def find(self, key: bytes) -> Member[S] | None:
        """The member with this key."""
        return next((member for member in self.members if member.key == key), None)

    def insert(self, member: Member[S]) -> Population[S]:
        """The population with a new member, or with a new version of a known one.

        A member whose value is not finite leaves.
        """
        others = [m for m in self.members if m.key != member.key]
        members = [m for m in (*others, member) if math.isfinite(m.value)]
        members.sort(key=lambda m: (m.value, m.key))
        return replace(self, members=tuple(members[: self.size]))

    def dump(self, space: Space[S, M]) -> list[dict[str, Any]]:
        """The members as JSON."""
        return [{"state": space.dump(m.state), "values": list(m.values)} for m in self.members]

    @classmethod
    def load(cls, size: int, entries: list[dict[str, Any]], space: Space[S, M]) -> Population[S]:
        """A population from the JSON of :meth:`dump`."""
        population = cls(size)
        for entry in entries:
            state = space.load(entry["state"])
            population = population.insert(
                Member(state, space.key(state), tuple(map(float, entry["values"])))
            )
        return population


CONFIRMATIONS = 2
"""Further measurements of a state that looks good, before it enters the population."""
SIGMAS = (2.0, 6.0, 20.0, 80.0)
"""Standard deviations of a random order, in positions."""
_START_SHARE = 0.5
"""Share of the random orders that start from the start state."""
_PAIR_SHARE = 0.5
"""Share of the others that start from two states of the portfolio, combined."""
_BASE_SCALE = 0.03
"""Loss of a portfolio state, relative to the best, at which it is e times less often a base."""
_MAX_VALUES = 60
"""Measurements of one member."""
# Keys of a checkpoint's memory.
_SUBMITTED = "submitted"
_DROPS = "drops"


@dataclass(frozen=True, slots=True)
class Ticket(Generic[S]):
    """What is known of a proposal in the pipeline."""

    label: str
    given: int | None = None
    """Number in the portfolio."""
    member: Member[S] | None = None
    """The state that is measured again."""


class Generation(Generic[S, M]):
    """Fills a pipeline with proposals and turns results into the next point of the search."""

    def __init__(
        self, task: Task[S, M], pipeline: Pipeline[S], point: Point[S], confirmations: int
    ) -> None:
        """``confirmations``: further measurements before a state enters the population."""
        self.task, self.pipeline, self.confirmations = task, pipeline, confirmations
        space = task.space
        self._singles: tuple[S, ...] = (
            tuple(space.portfolio()) if isinstance(space, PortfolioSpace) else ()
        )
        self._pairs: tuple[S, ...] | None = None
        self._tickets: dict[int, Ticket[S]] = {}
        self._to_confirm: deque[Member[S]] = deque()
        self._submitted = int(point.memory.get(_SUBMITTED, 0))

    @property
    def has_work(self) -> bool:
        """Whether a proposal is in the pipeline."""
        return bool(self._tickets)

    @staticmethod
    def drops(point: Point[S]) -> float:
        """Proposals in a row that gave no new state."""
        return point.memory.get(_DROPS, 0.0)

    def fill(self, point: Point[S]) -> None:
        """Submit proposals until the pipeline is full or the budget would be exceeded."""
        task = self.task
        while len(self._tickets) < self.pipeline.capacity:
            if task.clock.spent(point.evaluations + len(self._tickets)):
                return
            self._submit(*self._next(point))
        if self.pipeline.idle and not task.clock.spent(point.evaluations + len(self._tickets)):
            self._measure_again(point)

    def take(self, point: Point[S], finished: Finished[S]) -> Point[S]:
        """The next point after a proposal has left the pipeline."""
        ticket = self._tickets.pop(finished.number)
        measurement = finished.measurement
        if measurement is None:
            memory = self._memory(point, ticket, None)
            memory[_DROPS] = self.drops(point) + (ticket.member is None)
            moved = move_to(self.task, point, point.current, point.value, memory, rejected=1)
            return moved._replace(population=point.population)
        memory = self._memory(point, ticket, measurement.value)
        memory[_DROPS] = 0.0
        population: Population[S] = point.population
        member = ticket.member
        if member is None:
            member = Member(finished.state, self.task.space.key(finished.state), ())
        member = member.measured(measurement.value)
        population = self._enter(point, member, measurement)
        recorded = record_trial(
            self.task,
            self._with_best(point, population, measurement),
            ticket.label,
            finished.state,
            measurement,
            population.find(member.key) is not None,
            memory,
        )
        return recorded._replace(population=population)

    def _next(self, point: Point[S]) -> tuple[Proposal[S], Ticket[S]]:
        """The next proposal: to confirm a state, of the portfolio, or a random order."""
        if self._to_confirm:
            member = self._to_confirm.popleft()
            return Proposal(GIVEN, member.state), Ticket("measure again", member=member)
        number, state = next(self._missing_given(point), (-1, None))
        if state is not None:
            return Proposal(GIVEN, state), Ticket(f"portfolio {number}", given=number)
        return self.random_order(point)

    def random_order(self, point: Point[S]) -> tuple[Proposal[S], Ticket[S]]:
        """A random order of the start state or of a state of the portfolio.

        The setting that is best for the original order need not be best for another one, so each
        good setting is drawn.  In a space that cannot re-order, a few random moves.
        """
        rng = self.task.rng
        base = self._draw_base(point) if rng.random() >= _START_SHARE else self.task.start
        if isinstance(self.task.space, ReorderSpace):
            operator = Operator("reorder", float(rng.choice(SIGMAS)))
            label = f"random order sigma={operator.sigma:g}"
        else:
            operator = Operator("moves", count=int(rng.choice(MOVE_COUNTS)))
            label = str(operator)
        proposal = Proposal(operator, base, self.next_seed)
        return proposal, Ticket(label)

    @property
    def next_seed(self) -> tuple[int, int]:
        """Seed of the next proposal."""
        return self.task.seed, self._submitted

    def _draw_base(self, point: Point[S]) -> S:
        """A state of the portfolio, or the combination of two; the start state without values."""
        rng, space = self.task.rng, self.task.space
        start_value = self.task.start_measurement.value
        known = list(portfolio_values(space, point.memory, start_value))
        if not known or not isinstance(space, PortfolioSpace):
            return self.task.start
        values = np.array([value for _, value in known])
        weights = np.exp((values.min() - values) / (_BASE_SCALE * start_value))
        first, second = rng.choice(len(known), size=2, p=weights / weights.sum())
        base: S = known[int(first)][0]
        if rng.random() < _PAIR_SHARE:
            base = space.combine(base, known[int(second)][0]) or base
        return base

    def _submit(self, proposal: Proposal[S], ticket: Ticket[S]) -> None:
        number, self._submitted = self._submitted, self._submitted + 1
        self._tickets[number] = ticket
        self.pipeline.submit(number, proposal)

    def _missing_given(self, point: Point[S]) -> Iterator[tuple[int, S]]:
        """States of the portfolio without a value, by number; then pairs of those that help."""
        running = {ticket.given for ticket in self._tickets.values()}
        if self._pairs is None and running <= {None}:
            start_value = self.task.start_measurement.value
            is_complete = all(value_key(n) in point.memory for n in range(len(self._singles)))
            if is_complete:
                self._pairs = portfolio_pairs(self.task.space, point.memory, start_value)
        for number, state in enumerate((*self._singles, *(self._pairs or ()))):
            if value_key(number) not in point.memory and number not in running:
                yield number, state

    def _measure_again(self, point: Point[S]) -> None:
        """Measure the least measured member once more, because the device would wait."""
        busy = {ticket.member.key for ticket in self._tickets.values() if ticket.member}
        busy.add(self.task.space.key(self.task.start))
        free = [m for m in point.population if m.key not in busy and len(m.values) < _MAX_VALUES]
        if self.confirmations and free:
            member = min(free, key=lambda m: len(m.values))
            self._submit(Proposal(GIVEN, member.state), Ticket("measure again", member=member))

    def _enter(self, point: Point[S], member: Member[S], measurement: Measurement) -> Population[S]:
        """The population after a measurement of ``member``."""
        population: Population[S] = point.population
        known = population.find(member.key)
        if known is not None:
            return population.insert(known.measured(measurement.value))
        limit = min(population.threshold, self.task.start_measurement.value)
        if not member.value < limit:
            return population
        if len(member.values) <= self.confirmations:
            self._to_confirm.append(member)
            return population
        return population.insert(member)

    def _with_best(
        self, point: Point[S], population: Population[S], measurement: Measurement
    ) -> Point[S]:
        """The point with the best member of a measured search, and all its values that count."""
        best = next(iter(population), None)
        if not self.confirmations or best is None:
            return point
        if best.key == self.task.space.key(self.task.start):
            return point._replace(
                best=self.task.start, best_measurement=self.task.start_measurement
            )
        values = best.values[1:] or best.values
        kind, unit = self.task.objective.kind, self.task.objective.unit
        best_measurement = Measurement(unit, values, kind, measurement.provenance)
        return point._replace(best=best.state, best_measurement=best_measurement)

    def _memory(self, point: Point[S], ticket: Ticket[S], value: float | None) -> dict[str, float]:
        """The memory after a result: counts, and the portfolio's values."""
        memory = {**point.memory, _SUBMITTED: float(self._submitted)}
        if ticket.given is not None:
            memory[value_key(ticket.given)] = min(
                MISSING_VALUE if value is None else value, MISSING_VALUE
            )
        return memory


@dataclass(frozen=True, kw_only=True)
class RandomOrders(Search):
    """Random orders of the start state and of good settings.

    The portfolio of the space comes first (each state that differs from the start in one respect,
    then pairs of those that help), if it has one.  Then each proposal is a random order of the
    start state, of a state of the portfolio or of two of them combined; better ones are drawn more
    often.  An objective that is a :class:`Pipeline` prepares many proposals while it measures one;
    results are used in the order in which they arrive.

    A measured state enters the population of the best only after further measurements, which
    replace the value that selected it.  The result of a measured search is the member with the
    lowest median.

    With a modelled objective and a budget of evaluations the result is reproducible bit for bit.
    """

    name: ClassVar[str] = "random orders"

    population: int = 12
    """Most states that are kept."""
    max_drops: int = 2000
    """Proposals in a row without a new state after which the search is finished."""

    def __post_init__(self) -> None:
        if self.population < 2 or self.max_drops < 1:
            raise BadInput(
                f"{self.name} got population={self.population}, max_drops={self.max_drops}; allowed"
                " are population >= 2 and max_drops >= 1; leave out those that you do not want to "
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
        """Search until the budget is spent or proposals give no new state."""
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, {})
        pipeline: Pipeline[S]
        pipeline = objective if isinstance(objective, Pipeline) else Sequential(task)
        population: Population[S] = Population(self.population)
        if resume is None:
            start = Member(task.start, space.key(task.start), (point.value,))
            population = population.insert(start)
        else:
            population = Population.load(self.population, resume.population, space)
        point = point._replace(population=population)
        confirmations = CONFIRMATIONS if objective.kind == "measured" else 0
        task = replace(task, chooses_best=confirmations > 0)
        generation = self.proposals(task, pipeline, point, confirmations)

        def step(point: Point[S]) -> Point[S] | Stop:
            if generation.drops(point) >= self.max_drops:
                return "finished" if point.evaluations > 1 else "no legal move"
            generation.fill(point)
            if not generation.has_work:
                return "finished"
            return generation.take(point, pipeline.collect())

        try:
            return run(task, point, step)
        finally:
            pipeline.discard()

    def proposals(
        self, task: Task[S, M], pipeline: Pipeline[S], point: Point[S], confirmations: int
    ) -> Generation[S, M]:
        """What submits the proposals of a run."""
        return Generation(task, pipeline, point, confirmations)


def best_of_portfolio(result: SearchResult[S], space: Space[S, M], count: int) -> list[S]:
    """The states of the portfolio, and pairs of them, with the lowest values in a search."""
    start = result.start_measurement.value
    values = portfolio_values(space, result.checkpoint.memory, start)
    ranked = sorted(values, key=lambda pair: pair[1])
    return [state for state, value in ranked[:count] if value < MISSING_VALUE]


def finalists(result: SearchResult[S], space: Space[S, M]) -> list[Member[S]]:
    """The population at the end of a search, the lowest value first."""
    entries = result.checkpoint.population
    members = Population.load(max(1, len(entries)), entries, space).members
    return [member for member in members if math.isfinite(member.value)]
