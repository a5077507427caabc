"""The data-parallel and the operator explorer of the planner ``automap``.

Each explorer plays its game with a DQN and returns the placements of its best episode.  The paper's
games have no prices and place parameters or the batch only.  The integer program of the planner
``sharding`` places all other tensors, and the faster of the two plans is returned.  The paper's
third explorer is :mod:`.pipeline`.

The paper's game: decide one dimension after the other, to partition or to replicate it.

Section 4.1 and table 1: the state is a vector of all dimensions (-1 undecided, 0 replicated,
1 partitioned) and the position; the reward counts the dimensions that a decision settles, its
linkage group included.  A conflict ends the episode.

Propagation of partition decisions through a forward graph without redistributions (section 4).

Every operator has a set of strategies that are still possible.  An edge allows two strategies if
their placements are equal or change between partial and replicated; no shard is redistributed.  A
decision on a dimension restricts the strategies of one tensor; arc
consistency (AC-3) removes all others that have no partner left.  An empty set is a conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.papers.automap.dqn import DqnAgent, DqnParameters, Mask, Observation, train
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import Operator, ShardingGraph
from nostall.parallel.sharding.placements import (
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    Placement,
    shard,
)
from nostall.parallel.sharding.planners.rules import Rule
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    no_plan_fits,
    plan_by_rule,
)

Sets = NDArray[np.int64]
"""For each operator, the strategies that are possible, as bits."""
_WITHOUT_RESHARDING = {
    (PARTIAL_SUM, REPLICATED),
    (PARTIAL_MEAN, REPLICATED),
    (REPLICATED, PARTIAL_SUM),
}
"""Pairs of different placements, written and read, that need no redistribution of shards.  XLA
adds an all-reduce after a contraction; the last pair is a bias that addmm adds to partial sums."""
MAX_STRATEGIES = 62
"""Strategies that the bits of a set can number."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of a parameter or of a tensor of the batch."""

    operator: int
    dim: int


class Propagation:
    """Forward graph of a step on one mesh dimension.

    Raises :class:`BadPlan` for a mesh of several dimensions.
    """

    def __init__(self, graph: ShardingGraph) -> None:
        if len(graph.mesh) != 1:
            raise BadPlan(
                f"Auto-MAP slices tensors over all GPUs, and the mesh has {len(graph.mesh)} "
                "dimensions; give --mesh with one number"
            )
        self.graph = graph
        variable = _depend_on_variables(graph)
        edges = [
            edge
            for edge in graph.edges
            if graph.operators[edge.consumer].is_forward
            and graph.operators[edge.consumer].kind != "parameter"
            and edge.producer in variable
        ]
        count = len(graph.operators)
        self._sets = np.zeros(count, dtype=np.int64)
        for number, operator in enumerate(graph.operators):
            self._sets[number] = (1 << min(len(operator.strategies[0]), MAX_STRATEGIES)) - 1
        self._ends = np.array([(e.producer, e.consumer) for e in edges], dtype=np.int64)
        self._partners = np.zeros((len(edges), 2, MAX_STRATEGIES), dtype=np.int64)
        for number, edge in enumerate(edges):
            sources = [
                s.outputs[edge.output] for s in graph.operators[edge.producer].strategies[0]
            ][:MAX_STRATEGIES]
            targets = [
                s.inputs[edge.position] for s in graph.operators[edge.consumer].strategies[0]
            ][:MAX_STRATEGIES]
            for a, source in enumerate(sources):
                for b, target in enumerate(targets):
                    if source == target or (source, target) in _WITHOUT_RESHARDING:
                        self._partners[number, 0, a] |= 1 << b
                        self._partners[number, 1, b] |= 1 << a
        near: list[list[int]] = [[] for _ in range(count)]
        for number, edge in enumerate(edges):
            near[edge.producer].append(number)
            near[edge.consumer].append(number)
        self._first = np.cumsum([0, *map(len, near)])
        self._near = np.array([edge for own in near for edge in own], dtype=np.int64)

    def dimensions(self, kind: str) -> list[Dimension]:
        """Dimensions of all parameters, or of all tensors of the batch, that shard evenly."""
        return [
            Dimension(number, dim)
            for number, operator in enumerate(self.graph.operators)
            if operator.kind == kind
            for dim in range(len(self.graph.tensors[operator.outputs[0]].shape))
            if self._bit(Dimension(number, dim))
        ]

    def start(self, replicated_kinds: Iterable[str]) -> Sets | None:
        """The sets before any decision, with all tensors of some kinds replicated."""
        sets = self._sets.copy()
        for number, operator in enumerate(self.graph.operators):
            if operator.kind in replicated_kinds:
                sets[number] &= self._bits_of(number, REPLICATED)
        return sets if self._propagate(sets, range(len(sets))) else None

    def decide(self, sets: Sets, dimension: Dimension, *, partition: bool) -> Sets | None:
        """The sets after a decision and all that follow from it; None for a conflict."""
        result = sets.copy()
        bit = self._bit(dimension)
        result[dimension.operator] &= bit if partition else ~bit
        return result if self._propagate(result, [dimension.operator]) else None

    def decision(self, sets: Sets, dimension: Dimension) -> int:
        """1 if a dimension is partitioned, 0 if it is replicated, -1 if it is undecided."""
        own, bit = int(sets[dimension.operator]), self._bit(dimension)
        if own & bit == 0:
            return 0
        return 1 if own == bit else -1

    def placement(self, sets: Sets, operator: int) -> str:
        """The placement of a tensor whose dimensions are all decided; replicated otherwise."""
        (strategies,) = self.graph.operators[operator].strategies
        possible = [s.outputs[0] for i, s in enumerate(strategies) if int(sets[operator]) >> i & 1]
        return possible[0] if len(possible) == 1 else REPLICATED

    def _bit(self, dimension: Dimension) -> int:
        return self._bits_of(dimension.operator, shard(dimension.dim))

    def _bits_of(self, operator: int, placement: str) -> int:
        (strategies,) = self.graph.operators[operator].strategies
        return sum(1 << i for i, s in enumerate(strategies) if s.outputs[0] == placement)

    def _propagate(self, sets: Sets, changed: Sequence[int]) -> bool:
        """Restrict ``sets`` in place; False for a conflict."""
        if not sets[list(changed)].all():
            return False
        start = np.array(changed, dtype=np.int64)
        return bool(_restrict(sets, start, self._ends, self._partners, self._first, self._near))


def _depend_on_variables(graph: ShardingGraph) -> set[int]:
    """Operators that depend on a parameter or the batch; all others compute constants.

    Constants restrict nothing: every GPU has them whole and takes the shard it needs.
    """
    found: set[int] = set()
    for number, operator in enumerate(graph.operators):
        is_source = operator.kind in ("parameter", "input")
        if is_source or any(graph.producers[t] in found for t in operator.inputs):
            found.add(number)
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _restrict(
    sets: Sets,
    changed: NDArray[np.int64],
    ends: NDArray[np.int64],
    partners: NDArray[np.int64],
    first: NDArray[np.int64],
    near: NDArray[np.int64],
) -> bool:
    """AC-3 from the operators ``changed``; False if a set becomes empty."""
    count = len(sets)
    queue = np.empty(count + 1, dtype=np.int64)
    waiting = np.zeros(count, dtype=np.bool_)
    head, tail = 0, 0
    for operator in changed:
        queue[tail] = operator
        waiting[operator] = True
        tail += 1
    while head != tail:
        current = queue[head]
        head = (head + 1) % (count + 1)
        waiting[current] = False
        for place in range(first[current], first[current + 1]):
            edge = near[place]
            side = 0 if ends[edge, 0] == current else 1
            other = ends[edge, 1 - side]
            supported = np.int64(0)
            own = sets[current]
            for number in range(partners.shape[2]):
                if own >> number & 1:
                    supported |= partners[edge, side, number]
            restricted = sets[other] & supported
            if restricted == 0:
                return False
            if restricted != sets[other]:
                sets[other] = restricted
                if not waiting[other]:
                    waiting[other] = True
                    queue[tail] = other
                    tail = (tail + 1) % (count + 1)
    return True


PARTITION_REWARD, REPLICATE_REWARD, CONFLICT_REWARD = 0.4, 0.1, -1.0
REPLICATE, PARTITION = 0, 1
"""The two actions."""


@dataclass(frozen=True, slots=True)
class LinkageGroup:
    """Dimensions that a decision on one dimension settles, that one included."""

    dimension: Dimension
    partition: bool
    settled: int
    """Number of dimensions that become decided; 0 if the decision is a conflict."""


def linkage_groups(
    propagation: Propagation, start: Sets, dimensions: Sequence[Dimension]
) -> list[LinkageGroup]:
    """The groups of both decisions on each dimension, from a state without decisions."""
    undecided = sum(propagation.decision(start, d) < 0 for d in dimensions)
    groups = []
    for dimension in dimensions:
        for partition in (False, True):
            after = propagation.decide(start, dimension, partition=partition)
            left = (
                undecided
                if after is None
                else sum(propagation.decision(after, d) < 0 for d in dimensions)
            )
            groups.append(LinkageGroup(dimension, partition, undecided - left))
    return groups


class PartitionGame:
    """The game on the dimensions of one kind of tensor.

    ``by_linkage`` sorts the dimensions by the size of their largest linkage group, largest first;
    otherwise they stay in the order of the graph.  Raises :class:`Infeasible` if there is no
    dimension to decide, or if the start is a conflict.
    """

    actions = 2

    def __init__(
        self, propagation: Propagation, kind: str, replicated_kinds: Sequence[str], *,
        by_linkage: bool, start: Sets | None = None,
    ) -> None:  # fmt: skip
        """``start`` has decisions that stay; None is a start without decisions."""
        start = propagation.start(replicated_kinds) if start is None else start
        dimensions = propagation.dimensions(kind)
        if start is None or not dimensions:
            raise Infeasible(
                f"no dimension of any {kind} can be divided by {propagation.graph.mesh[0]} GPUs "
                "without a conflict; use another number of GPUs, or the planner sharding"
            )
        self.propagation, self._start = propagation, start
        self.dimensions = dimensions
        if by_linkage:
            size: dict[Dimension, int] = {}
            for group in linkage_groups(propagation, start, dimensions):
                size[group.dimension] = max(size.get(group.dimension, 0), group.settled)
            self.dimensions = sorted(dimensions, key=lambda d: -size[d])
        self.observation_size = len(self.dimensions) + 1
        self.best: Sets = start
        """The sets of the best finished episode, or those of the start."""
        self.best_partitioned = -1
        self.conflicts = self.episodes = 0
        self.reset()

    def reset(self) -> tuple[Observation, Mask]:
        """Start an episode at the first dimension that is not decided."""
        self._sets = self._start
        self._decisions = self._read(self._sets)
        self._position = self._next_undecided(0)
        return self._observe(), np.ones(2, dtype=np.bool_)

    def step(self, action: int) -> tuple[Observation, Mask, float, bool]:
        """Decide the current dimension."""
        if self._position >= len(self.dimensions):
            return self._finish(0.0)
        after = self.propagation.decide(
            self._sets, self.dimensions[self._position], partition=action == PARTITION
        )
        mask = np.ones(2, dtype=np.bool_)
        if after is None:
            self.conflicts += 1
            self.episodes += 1
            return self._observe(), mask, CONFLICT_REWARD, True
        decisions = self._read(after)
        is_new = self._decisions < 0
        reward = PARTITION_REWARD * int((is_new & (decisions == 1)).sum())
        reward += REPLICATE_REWARD * int((is_new & (decisions == 0)).sum())
        self._sets, self._decisions = after, decisions
        self._position = self._next_undecided(self._position)
        if self._position >= len(self.dimensions):
            return self._finish(reward)
        return self._observe(), mask, reward, False

    def without_replications(self) -> Sets | None:
        """Start of the fine-tuning game.

        It keeps the dimensions that the best episode partitioned and leaves all others undecided.
        None if all dimensions are decided by the partitions alone.
        """
        sets = self._start
        for dimension in self.dimensions:
            is_partitioned = self.propagation.decision(self.best, dimension) == 1
            if is_partitioned and self.propagation.decision(sets, dimension) != 1:
                after = self.propagation.decide(sets, dimension, partition=True)
                assert after is not None  # the best episode has the same decisions and more
                sets = after
        return sets if (self._read(sets) < 0).any() else None

    @property
    def partitioned(self) -> int:
        """Dimensions that are partitioned in the current episode."""
        return int((self._decisions == 1).sum())

    def _finish(self, reward: float) -> tuple[Observation, Mask, float, bool]:
        self.episodes += 1
        if self.partitioned > self.best_partitioned:
            self.best, self.best_partitioned = self._sets, self.partitioned
        return self._observe(), np.ones(2, dtype=np.bool_), reward, True

    def _read(self, sets: Sets) -> np.ndarray:
        return np.array([self.propagation.decision(sets, d) for d in self.dimensions])

    def _next_undecided(self, position: int) -> int:
        while position < len(self.dimensions) and self._decisions[position] >= 0:
            position += 1
        return position

    def _observe(self) -> Observation:
        return np.array([*self._decisions, self._position], dtype=np.float32)


GAME_SHARE = 0.3
"""Share of the time limit that the first stage of each explorer plays."""
TUNING_SHARE = 0.25
"""Time of the fine-tuning stage over that of the first, which it adds to."""


@dataclass(frozen=True, slots=True)
class Explorer:
    """One of the paper's explorers."""

    name: str
    decided: str
    """Kind of the tensors whose dimensions the game decides."""
    replicated: str
    """Kind of the tensors that stay replicated."""
    steps: int
    """Steps over which epsilon falls; the game lasts twice as many."""
    by_linkage: bool


EXPLORERS = (
    Explorer("automap-data", "input", "parameter", 500, by_linkage=False),
    Explorer("automap-operator", "parameter", "input", 2000, by_linkage=True),
)
"""Data parallelism (ADP) and operator partitioning (OPP), with the paper's numbers of steps."""


@dataclass(frozen=True)
class Exploration:
    """Result of one explorer."""

    explorer: Explorer
    placements: dict[int, Placement]
    """Placement of each tensor that the game decided, by the number of its operator."""
    dimensions: int
    partitioned: int
    """Dimensions that the best episode partitions."""
    episodes: int
    """Of both stages, as are conflicts and steps."""
    conflicts: int
    steps: int
    fine_tuned: int = 0
    """Dimensions that the fine-tuning stage partitions beyond those of the first stage."""


def explore(graph: ShardingGraph, explorer: Explorer, options: Options, seed: int) -> Exploration:
    """Play an explorer's game; raises :class:`Infeasible` if nothing can be decided.

    The fine-tuning stage (section 4.1) follows where the first left decisions to replicate: they
    are undone and decided anew, with a new agent, and the partitions stay.
    """
    propagation = Propagation(graph)
    game = PartitionGame(
        propagation, explorer.decided, (explorer.replicated,), by_linkage=explorer.by_linkage
    )
    limit_s, begin_s = options.seconds * GAME_SHARE, options.elapsed_s
    steps = _play(game, explorer, seed, lambda: options.elapsed_s - begin_s > limit_s)
    first, games = game.best_partitioned, [game]
    start = game.without_replications() if first >= 0 else None
    if start is not None:
        tuned = PartitionGame(
            propagation, explorer.decided, (explorer.replicated,),
            by_linkage=explorer.by_linkage, start=start,
        )  # fmt: skip
        more_s = limit_s * (1 + TUNING_SHARE)
        steps += _play(tuned, explorer, seed, lambda: options.elapsed_s - begin_s > more_s)
        games.append(tuned)
        game = tuned if tuned.best_partitioned > first else game
    numbers = graph.of_kind("parameter" if explorer.decided == "parameter" else "input")
    return Exploration(
        explorer,
        {number: propagation.placement(game.best, number) for number in numbers},
        len(game.dimensions),
        max(0, game.best_partitioned),
        sum(own.episodes for own in games),
        sum(own.conflicts for own in games),
        steps,
        game.best_partitioned - first,
    )


def _play(game: PartitionGame, explorer: Explorer, seed: int, is_over: Callable[[], bool]) -> int:
    """Train a new agent on a game; returns its steps."""
    parameters = DqnParameters(epsilon_steps=explorer.steps)
    agent = DqnAgent(game.observation_size, game.actions, parameters, seed)
    train(game, agent, 2 * explorer.steps, is_over)
    return agent.steps


def plan_automap(
    prices: Prices, options: Options, seed: int = 0, cheap: Sequence[ShardingPlan] = ()
) -> tuple[ShardingPlan, list[ShardingPlan]]:
    """The fastest plan of the two explorers that fits into memory, and both explorers' plans.

    A faster one of ``cheap``, plans that are known, is returned instead.  Raises
    :class:`Infeasible` if no plan fits.
    """
    plans = []
    for number, explorer in enumerate(EXPLORERS):
        options.report_progress(number / len(EXPLORERS), explorer.name)
        try:
            exploration = explore(prices.graph, explorer, options, seed)
        except Infeasible:
            continue  # this explorer has nothing to decide
        plan = plan_by_rule(prices, _rule(exploration), options)
        plans += [plan] if plan is not None else []
    plans.sort(key=lambda plan: plan.whole_s)
    fitting = [plan for plan in (*plans, *cheap) if plan.fits(options.memory)]
    if not fitting:
        raise no_plan_fits(plans, options)
    return min(fitting, key=lambda plan: plan.whole_s).renamed("automap"), plans


def _rule(exploration: Exploration) -> Rule:
    """The placements of an exploration as a rule; all other tensors of the kinds stay whole."""

    def wanted(operator: Operator, graph: ShardingGraph) -> Placement | None:
        if operator.kind not in ("parameter", "input"):
            return None
        placed = exploration.placements
        return placed.get(graph.producers[operator.outputs[0]], REPLICATED)

    return Rule(exploration.explorer.name, wanted, wanted)
