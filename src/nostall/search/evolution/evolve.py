"""Evolutionary search over orders: children of the best states so far, and random orders.

Bandit that chooses operators: Thompson sampling with discounted rewards.

Each operator has a Beta distribution of its reward (0 to 1).  A choice draws one value from each
distribution and takes the operator with the largest.  Rewards fade with the number of later
observations, because an operator that helps early may not help later (Raj and Kalyani, "Taming
non-stationary bandits", arXiv:1707.09727).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nostall.core.space import M, S
from nostall.search.evolution.operators import (
    IMMIGRANTS,
    Operator,
    Proposal,
    ReorderSpace,
    operators_of,
)
from nostall.search.evolution.pipeline import Pipeline
from nostall.search.evolution.random_orders import (
    Generation,
    Member,
    Population,
    RandomOrders,
    Ticket,
)
from nostall.search.loop import Point, Task

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


IMMIGRANT_SHARE = 0.4
"""Share of new orders that do not descend from the population."""
_DROP_WEIGHT = 0.3
"""Weight of a dropped proposal in the bandit: it costs no measurement."""
_FULL_REWARD = 0.001
"""Gain over the worst member for which an operator gets the full reward.  Winners descend from
their first ancestor in many steps of about this size."""
_RANK_FACTOR = 0.8
"""Probability of a rank as a parent, relative to the rank before it."""


def draw_parent(population: Population[S], rng: np.random.Generator) -> Member[S]:
    """A parent: the lower its value, the more often it is drawn."""
    weights = _RANK_FACTOR ** np.arange(len(population))
    return population.members[int(rng.choice(len(population), p=weights / weights.sum()))]


class Children(Generation[S, M]):
    """New proposals are children of the population, or random orders."""

    def __init__(
        self,
        task: Task[S, M],
        pipeline: Pipeline[S],
        point: Point[S],
        confirmations: int,
        without: Sequence[str],
    ) -> None:
        """``without``: patterns of operators that are not used."""
        super().__init__(task, pipeline, point, confirmations)
        self.operators: tuple[Operator, ...] = operators_of(task.space, without)
        self._immigrant_share = 0.0 if IMMIGRANTS in without else IMMIGRANT_SHARE

    def new(self, point: Point[S]) -> tuple[Proposal[S], Ticket[S]]:
        """A child, whose operator the bandit chooses, or a random order.

        Children alone search the surroundings of the first good states.
        """
        rng = self.task.rng
        if isinstance(self.task.space, ReorderSpace) and rng.random() < self._immigrant_share:
            return self.random_order(point)
        chosen = Bandit.load(point.memory, len(self.operators)).choose(rng)
        operator = self.operators[chosen]
        population: Population[S] = point.population
        parent, other = draw_parent(population, rng), draw_parent(population, rng)
        proposal = Proposal(operator, parent.state, other.state, self.next_seed)
        return proposal, Ticket(str(operator), operator=chosen)

    def learn(self, point: Point[S], ticket: Ticket[S], value: float | None) -> Mapping[str, float]:
        """The bandit's rewards after a result."""
        if ticket.operator is None:
            return {}
        population: Population[S] = point.population
        limit = min(population.threshold, self.task.start_measurement.value)
        gain = math.log(limit / value) if value is not None and 0 < value < math.inf else 0.0
        weight = _DROP_WEIGHT if value is None else 1.0
        bandit = Bandit.load(point.memory, len(self.operators))
        return bandit.reward(ticket.operator, gain / _FULL_REWARD, weight).dump()


@dataclass(frozen=True, kw_only=True)
class Evolve(RandomOrders):
    """Steady-state evolution with a bandit over its operators.

    As :class:`RandomOrders`, but most proposals are children of members of the population.  A
    bandit chooses the operator, with a reward for children that enter the population.
    """

    name: ClassVar[str] = "evolve"

    without: tuple[str, ...] = ()
    """Patterns of operators that are not used, e.g. ``("* hot", "immigrants")``: for ablations."""

    def proposals(
        self, task: Task[S, M], pipeline: Pipeline[S], point: Point[S], confirmations: int
    ) -> Generation[S, M]:
        """What submits the proposals of a run."""
        return Children(task, pipeline, point, confirmations, self.without)
