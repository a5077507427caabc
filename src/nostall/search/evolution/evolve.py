"""Evolutionary search over orders: a portfolio first, then children of the best states so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from nostall.search.evolution.generation import CONFIRMATIONS, Generation
from nostall.search.evolution.given import MISSING_VALUE, portfolio_values
from nostall.search.evolution.pipeline import Pipeline, Sequential
from nostall.search.evolution.population import Member, Population
from nostall.search.loop import Point, begin, run


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
        generation = Generation(task, pipeline, point, confirmations, self.without)

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
