"""Evolutionary search over orders: children of the best states so far, and random orders.

It was the search of the assembler's input with which committed results were measured;
``ptx.search_comparison`` and ``ptx.assembler_suite`` measure it again.

A bandit chooses the operators: Thompson sampling with discounted rewards.  Each operator has a Beta
distribution of its reward (0 to 1).  A choice draws one value from each distribution and takes the
operator with the largest.  Rewards fade with the number of later observations, because an operator
that helps early may not help later (Raj and Kalyani, "Taming non-stationary bandits",
arXiv:1707.09727).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import singledispatch
from typing import Any, ClassVar, Literal

import numpy as np

from nostall.core import BadInput, Space
from nostall.core.space import M, S, Tags
from nostall.ptx.schedule.levers import LEVERS, lever_value, with_lever
from nostall.ptx.schedule.state import PtxState
from nostall.search.loop import Point, Task
from nostall.search.orders.operators import MOVE_COUNTS, Operator, Proposal, ReorderSpace
from nostall.search.orders.pipeline import Pipeline
from nostall.search.orders.random_orders import (
    Generation,
    Member,
    Population,
    RandomOrders,
    Ticket,
)
from nostall.tuning.assembler.space import AssemblerSpace

SIGMAS = (1.0, 3.0, 8.0, 20.0)
"""Standard deviations of a re-ordering, in positions."""
LEVER: Tags = frozenset({"lever"})
IMMIGRANTS = "immigrants"
"""Name of the operator that re-orders the start state or one of the portfolio."""
_LOOP_WEIGHT = 10
"""Weight of a block, per loop around it: about the trip count of a short loop of a kernel."""
_MAX_DEPTH = 3

DISCOUNT = 0.99
"""Factor by which an older observation of the same operator counts less."""
_PRIOR_SUCCESS, _PRIOR_FAILURE = 0.5, 1.5
"""Observations that each operator starts with."""


@singledispatch
def recombine(space: Any, first: Any, second: Any, rng: np.random.Generator) -> Any:
    """A state whose order of each block, and whose settings, each come from one parent."""
    raise TypeError(f"no recombination is known for {type(space).__name__}; register one")


@singledispatch
def block_weights(space: Any) -> Sequence[float]:
    """How much a change of each block is expected to matter."""
    raise TypeError(f"no weights of blocks are known for {type(space).__name__}; register them")


@recombine.register
def _(
    space: AssemblerSpace, first: PtxState, second: PtxState, rng: np.random.Generator
) -> PtxState:
    ptx, parents = space.ptx, (first, second)
    choice = rng.integers(2, size=len(ptx.blocks))
    orders = {number: ptx.order(parents[c], number) for number, c in enumerate(choice)}
    settings = replace(first, hints=parents[int(rng.integers(2))].hints)
    for lever in LEVERS:
        value = lever_value(parents[int(rng.integers(2))], lever)
        settings = with_lever(settings, lever, value)
    return ptx.with_orders(settings, orders)


@block_weights.register
def _(space: AssemblerSpace) -> tuple[float, ...]:
    """Per block, its free pairs of units times _LOOP_WEIGHT per loop around it."""
    return tuple(
        float(graph.freedom * _LOOP_WEIGHT ** min(graph.block.depth, _MAX_DEPTH))
        for graph in space.ptx.graphs
    )


@dataclass(frozen=True, slots=True)
class Variation(Operator):
    """An operator of the evolution."""

    scope: Literal["all", "hot", "both"] = "all"
    """What ``reorder`` changes: all blocks, or one that is drawn by its weight.  ``both``: no new
    order, each block has that of one of two parents."""

    def __str__(self) -> str:
        if self.scope == "both":
            return "recombine"
        return Operator.__str__(self).replace(" all", f" {self.scope}")


@dataclass(frozen=True, slots=True)
class Child(Proposal[S]):
    """A proposal with a second parent."""

    other: S | None = None

    def realize(self, space: Any) -> S:
        """As :meth:`Proposal.realize`."""
        operator, rng = self.operator, np.random.default_rng(self.seed)
        scope = operator.scope if isinstance(operator, Variation) else "all"
        if scope == "both":
            recombined: S = recombine(space, self.parent, self.other, rng)
            return recombined
        if scope == "hot":
            blocks = [_draw_block(block_weights(space), rng)]
            reordered: S = space.reorder(self.parent, rng, operator.sigma, blocks)
            return reordered
        return Proposal.realize(self, space)


@dataclass(frozen=True, slots=True)
class ChildTicket(Ticket[S]):
    """What is known of a child in the pipeline."""

    variation: int = 0
    """Number of the variation that gets the reward."""


def variations_of(space: Space[S, M], without: Sequence[str] = ()) -> tuple[Variation, ...]:
    """The variations that a space supports, without those whose names match a pattern.

    Raises :class:`~nostall.core.errors.BadInput` for a pattern without a match, and if no variation
    is left.
    """
    supported = _supported(space)
    names = list(map(str, supported))
    left = [v for v in supported if not any(fnmatchcase(str(v), p) for p in without)]
    unknown = [p for p in without if p != IMMIGRANTS and not any(fnmatchcase(n, p) for n in names)]
    if unknown or not left:
        raise BadInput(
            f"evolve got without={list(without)}; the operators of this space are "
            f"{[*names, IMMIGRANTS]}; give patterns that match some of them, not all"
        )
    return tuple(left)


def _supported(space: Space[S, M]) -> tuple[Variation, ...]:
    if not isinstance(space, ReorderSpace):
        return tuple(Variation("moves", count=count) for count in MOVE_COUNTS)
    reorders = [
        Variation("reorder", sigma, scope=scope) for sigma in SIGMAS for scope in ("all", "hot")
    ]
    both, lever = Variation("reorder", scope="both"), Variation("moves", count=1, tags=LEVER)
    return (*reorders, both, lever)


def _draw_block(weights: Sequence[float], rng: np.random.Generator) -> int:
    """A block, drawn by its weight."""
    share = np.asarray(weights, dtype=np.float64)
    if not share.any():
        share = np.ones(len(share))
    return int(rng.choice(len(share), p=share / share.sum()))


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
        self.variations = variations_of(task.space, without)
        self._immigrant_share = 0.0 if IMMIGRANTS in without else IMMIGRANT_SHARE

    def random_order(self, point: Point[S]) -> tuple[Proposal[S], Ticket[S]]:
        """A child, whose variation the bandit chooses, or a random order.

        Children alone search the surroundings of the first good states.
        """
        rng = self.task.rng
        if isinstance(self.task.space, ReorderSpace) and rng.random() < self._immigrant_share:
            return super().random_order(point)
        chosen = Bandit.load(point.memory, len(self.variations)).choose(rng)
        variation = self.variations[chosen]
        population: Population[S] = point.population
        parent, other = draw_parent(population, rng), draw_parent(population, rng)
        child = Child(variation, parent.state, self.next_seed, other.state)
        return child, ChildTicket(str(variation), variation=chosen)

    def _memory(self, point: Point[S], ticket: Ticket[S], value: float | None) -> dict[str, float]:
        """With the bandit's rewards."""
        memory = super()._memory(point, ticket, value)
        if not isinstance(ticket, ChildTicket):
            return memory
        population: Population[S] = point.population
        limit = min(population.threshold, self.task.start_measurement.value)
        gain = math.log(limit / value) if value is not None and 0 < value < math.inf else 0.0
        weight = _DROP_WEIGHT if value is None else 1.0
        bandit = Bandit.load(point.memory, len(self.variations))
        return memory | bandit.reward(ticket.variation, gain / _FULL_REWARD, weight).dump()


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
