"""The data-parallel and the operator explorer of the planner ``automap``.

Each explorer plays its game with a DQN and returns the placements of its best episode.  The paper's
games have no prices and place parameters or the batch only.  The integer program of the planner
``sharding`` places all other tensors, and the faster of the two plans is returned.  The paper's
third explorer is :mod:`.pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nostall.papers.automap.dqn import DqnAgent, DqnParameters, train
from nostall.papers.automap.game import PartitionGame
from nostall.papers.automap.propagation import Propagation
from nostall.parallel.errors import Infeasible
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import Operator, ShardingGraph
from nostall.parallel.sharding.placements import REPLICATED, Placement
from nostall.parallel.sharding.planners.rules import Rule
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    no_plan_fits,
    plan_by_rule,
)

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
    plans.sort(key=lambda plan: plan.step_s)
    fitting = [plan for plan in (*plans, *cheap) if plan.fits(options.memory)]
    if not fitting:
        raise no_plan_fits(plans, options)
    return min(fitting, key=lambda plan: plan.step_s).renamed("automap"), plans


def _rule(exploration: Exploration) -> Rule:
    """The placements of an exploration as a rule; all other tensors of the kinds stay whole."""

    def wanted(operator: Operator, graph: ShardingGraph) -> Placement | None:
        if operator.kind not in ("parameter", "input"):
            return None
        placed = exploration.placements
        return placed.get(graph.producers[operator.outputs[0]], REPLICATED)

    return Rule(exploration.explorer.name, wanted, wanted)
