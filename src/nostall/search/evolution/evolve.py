"""Evolutionary search over orders: a portfolio first, then children of the best states so far.

Bandit that chooses operators: Thompson sampling with discounted rewards.

Each operator has a Beta distribution of its reward (0 to 1).  A choice draws one value from each
distribution and takes the operator with the largest.  Rewards fade with the number of later
observations, because an operator that helps early may not help later (Raj and Kalyani, "Taming
non-stationary bandits", arXiv:1707.09727).

One evolving generation: which proposals enter the pipeline, and what their results change.

Values of a space's portfolio in a search, and the pairs of states that help.

Population of the best states, each with all its measured values.
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
from nostall.search.evolution.operators import (
    GIVEN,
    IMMIGRANTS,
    Operator,
    PortfolioSpace,
    Proposal,
    ReorderSpace,
    operators_of,
)
from nostall.search.evolution.pipeline import Finished, Pipeline, Sequential
from nostall.search.loop import Point, Task, begin, move_to, record_trial, run

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


_RANK_FACTOR = 0.8
"""Probability of a rank as a parent, relative to the rank before it."""


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

    def draw(self, rng: np.random.Generator) -> Member[S]:
        """A parent: the lower its value, the more often it is drawn."""
        weights = _RANK_FACTOR ** np.arange(len(self.members))
        return self.members[int(rng.choice(len(self.members), p=weights / weights.sum()))]

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


DISCOUNT = 0.99
"""Factor by which an older observation of the same operator counts less."""
_PRIOR_SUCCESS, _PRIOR_FAILURE = 0.5, 1.5
"""Observations that each operator starts with."""


@dataclass(frozen=True, slots=True)
class Bandit:
    """Rewards of operators; immutable."""

    successes: tuple[float, ...]
    failures: tuple[float, ...]
    """Discounted sums of rewards, and of 1 - reward, by operator."""

    @classmethod
    def of(cls, count: int) -> Bandit:
        """A bandit for ``count`` operators without observations."""
        return cls((0.0,) * count, (0.0,) * count)

    def choose(self, rng: np.random.Generator) -> int:
        """The number of an operator."""
        draws = rng.beta(
            np.asarray(self.successes) + _PRIOR_SUCCESS, np.asarray(self.failures) + _PRIOR_FAILURE
        )
        return int(np.argmax(draws))

    def reward(self, number: int, value: float, weight: float = 1.0) -> Bandit:
        """The bandit after an operator got the reward ``value``, which counts ``weight`` times."""
        value = min(1.0, max(0.0, value))
        successes, failures = list(self.successes), list(self.failures)
        successes[number] = DISCOUNT * successes[number] + weight * value
        failures[number] = DISCOUNT * failures[number] + weight * (1.0 - value)
        return Bandit(tuple(successes), tuple(failures))

    def dump(self) -> dict[str, float]:
        """The rewards as numbers of a checkpoint."""
        pairs = zip(self.successes, self.failures, strict=True)
        return {
            key: value
            for n, (success, failure) in enumerate(pairs)
            for key, value in ((f"success{n:03}", success), (f"failure{n:03}", failure))
        }

    @classmethod
    def load(cls, memory: dict[str, float], count: int) -> Bandit:
        """A bandit from the numbers of :meth:`dump`; operators without numbers start anew."""
        return cls(
            tuple(memory.get(f"success{n:03}", 0.0) for n in range(count)),
            tuple(memory.get(f"failure{n:03}", 0.0) for n in range(count)),
        )


CONFIRMATIONS = 2
"""Further measurements of a state that looks good, before it enters the population."""
IMMIGRANT_SHARE = 0.4
"""Share of new orders that do not descend from the population: they start from the portfolio."""
IMMIGRANT_SIGMAS = (2.0, 6.0, 20.0, 80.0)
_START_SHARE = 0.5
"""Share of the immigrants that start from the start state."""
_PAIR_SHARE = 0.5
"""Share of the other immigrants that start from two states of the portfolio, combined."""
_BASE_SCALE = 0.03
"""Loss of a portfolio state, relative to the best, at which it is e times less often a base."""
_MAX_VALUES = 60
"""Measurements of one member."""
_DROP_WEIGHT = 0.3
"""Weight of a dropped proposal in the bandit: it costs no measurement."""
_FULL_REWARD = 0.001
"""Gain over the worst member for which an operator gets the full reward.  Winners descend from
their first ancestor in many steps of about this size."""

# Keys of a checkpoint's memory.
_SUBMITTED = "submitted"
_DROPS = "drops"


@dataclass(frozen=True, slots=True)
class _Ticket(Generic[S]):
    """What is known of a proposal in the pipeline."""

    label: str
    operator: int | None = None
    """Number of the operator that gets the reward."""
    given: int | None = None
    """Number in the portfolio."""
    member: Member[S] | None = None
    """The state that is measured again."""


class Generation(Generic[S, M]):
    """Fills a pipeline with proposals and turns results into the next point of the search."""

    def __init__(
        self,
        task: Task[S, M],
        pipeline: Pipeline[S],
        point: Point[S],
        confirmations: int,
        without: Sequence[str] = (),
        immigrants: float = IMMIGRANT_SHARE,
        random_until: float = 0.0,
    ) -> None:
        """``confirmations``: further measurements before a state enters the population.

        ``without``: patterns of operators that are not used.  ``immigrants``: share of new orders
        that do not descend from the population; all do not before the part ``random_until`` of the
        budget is spent.
        """
        self._random_until = random_until
        self.task, self.pipeline, self.confirmations = task, pipeline, confirmations
        self.operators: tuple[Operator, ...] = operators_of(task.space, without)
        self._immigrant_share = 0.0 if IMMIGRANTS in without else immigrants
        space = task.space
        self._singles: tuple[S, ...] = (
            tuple(space.portfolio()) if isinstance(space, PortfolioSpace) else ()
        )
        self._pairs: tuple[S, ...] | None = None
        self._tickets: dict[int, _Ticket[S]] = {}
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
            memory = self._memory(point, ticket, math.inf, _DROP_WEIGHT)
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

    def _next(self, point: Point[S]) -> tuple[Proposal[S], _Ticket[S]]:
        """The next proposal: to confirm a state, of the portfolio, or a child."""
        if self._to_confirm:
            member = self._to_confirm.popleft()
            return Proposal(GIVEN, member.state), _Ticket("measure again", member=member)
        number, state = next(self._missing_given(point), (-1, None))
        if state is not None:
            return Proposal(GIVEN, state), _Ticket(f"portfolio {number}", given=number)
        population: Population[S] = point.population
        rng = self.task.rng
        is_early = self.task.progress(point.evaluations) < self._random_until
        share = 1.0 if is_early else self._immigrant_share
        if isinstance(self.task.space, ReorderSpace) and rng.random() < share:
            return self._immigrant(point)
        chosen = Bandit.load(point.memory, len(self.operators)).choose(rng)
        operator = self.operators[chosen]
        parent, other = population.draw(rng), population.draw(rng)
        seed = (self.task.seed, self._submitted)
        proposal = Proposal(operator, parent.state, other.state, seed)
        return proposal, _Ticket(str(operator), operator=chosen)

    def _immigrant(self, point: Point[S]) -> tuple[Proposal[S], _Ticket[S]]:
        """A random order of the start state or of a state of the portfolio.

        Children alone search the surroundings of the first good states, and a setting that is best
        for the original order need not be best for another one.
        """
        rng = self.task.rng
        base = self._draw_base(point) if rng.random() >= _START_SHARE else self.task.start
        operator = Operator("reorder", float(rng.choice(IMMIGRANT_SIGMAS)))
        proposal = Proposal(operator, base, None, (self.task.seed, self._submitted))
        return proposal, _Ticket(f"immigrant sigma={operator.sigma:g}")

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

    def _submit(self, proposal: Proposal[S], ticket: _Ticket[S]) -> None:
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
            self._submit(Proposal(GIVEN, member.state), _Ticket("measure again", member=member))

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

    def _memory(
        self, point: Point[S], ticket: _Ticket[S], value: float, weight: float = 1.0
    ) -> dict[str, float]:
        """The memory after a result: counts, the portfolio's values and the bandit's rewards."""
        memory = {**point.memory, _SUBMITTED: float(self._submitted)}
        if ticket.given is not None:
            memory[value_key(ticket.given)] = min(value, MISSING_VALUE)
        if ticket.operator is not None:
            population: Population[S] = point.population
            limit = min(population.threshold, self.task.start_measurement.value)
            gain = math.log(limit / value) if 0 < value < math.inf else 0.0
            bandit = Bandit.load(point.memory, len(self.operators))
            memory |= bandit.reward(ticket.operator, gain / _FULL_REWARD, weight).dump()
        return memory


@dataclass(frozen=True, kw_only=True)
class Evolve(Search):
    """Steady-state evolution with a bandit over its operators.

    The portfolio of the space comes first (each state that differs from the start in one respect,
    then pairs of those that help), if it has one.  Then each proposal is a child of a member of the
    population.  A bandit chooses the operator, with a reward for children that enter the
    population.  An objective that is a :class:`Pipeline` prepares many proposals while it measures
    one; results are used in the order in which they arrive.

    A measured state enters the population only after further measurements, which replace the value
    that selected it.  The result of a measured search is the member with the lowest median.

    With a modelled objective and a budget of evaluations the result is reproducible bit for bit.
    """

    name: ClassVar[str] = "evolve"

    population: int = 12
    """Most states that have children."""
    max_drops: int = 2000
    """Proposals in a row without a new state after which the search is finished."""
    without: tuple[str, ...] = ()
    """Patterns of operators that are not used, e.g. ``("* hot", "immigrants")``: for ablations."""
    immigrants: float = IMMIGRANT_SHARE
    """Share of new orders that do not descend from the population: random orders of the start
    state and of the portfolio.  With 1 all are."""
    random_until: float = 0.0
    """Part of the budget in which all new orders are random."""

    def __post_init__(self) -> None:
        if self.population < 2 or self.max_drops < 1:
            raise BadInput(
                f"evolve got population={self.population}, max_drops={self.max_drops}; allowed are "
                "population >= 2 and max_drops >= 1; leave out those that you do not want to change"
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
        """Evolve until the budget is spent or proposals give no new state."""
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
        generation = Generation(
            task, pipeline, point, confirmations, self.without, self.immigrants, self.random_until
        )

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
