"""One evolving generation: which proposals enter the pipeline, and what their results change."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from nostall.core import Measurement
from nostall.core.space import M, S
from nostall.search.evolution.bandit import Bandit
from nostall.search.evolution.given import (
    MISSING_VALUE,
    portfolio_pairs,
    portfolio_values,
    value_key,
)
from nostall.search.evolution.operators import (
    GIVEN,
    IMMIGRANTS,
    Operator,
    PortfolioSpace,
    Proposal,
    ReorderSpace,
    operators_of,
)
from nostall.search.evolution.pipeline import Finished, Pipeline
from nostall.search.evolution.population import Member, Population
from nostall.search.loop import Point, Task, move_to, record_trial

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
    ) -> None:
        """``confirmations``: further measurements before a state enters the population.

        ``without``: patterns of operators that are not used.
        """
        self.task, self.pipeline, self.confirmations = task, pipeline, confirmations
        self.operators: tuple[Operator, ...] = operators_of(task.space, without)
        self._immigrant_share = 0.0 if IMMIGRANTS in without else IMMIGRANT_SHARE
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
        if isinstance(self.task.space, ReorderSpace) and rng.random() < self._immigrant_share:
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
