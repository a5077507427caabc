"""Does a DQN on improvement episodes pay beside annealing by trees and the integer program?

    python -m benchmarks run sharding.improvement --out benchmarks/sharding/results/improvement.json

An episode starts from the data-parallel plan.  An action gives a parameter, a tensor of the batch
or a matrix product a strategy; then all other operators take their cheapest strategy, given their
neighbours, until nothing changes.  The reward is the modelled time that this saves, over that of
the start.  The DQN, random actions and annealing have the same CPU time on one thread.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import h100, one_server
from benchmarks.sharding.models import MODELS
from benchmarks.sharding.planning import SIZES
from nostall.papers.automap.dqn import DqnAgent, DqnParameters, Mask, Observation, train
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.planners.integer_program import Problem, solve
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule
from nostall.parallel.sharding.planners.tied import tie
from nostall.parallel.sharding.planners.tree_annealing import Integers, Tables, anneal, make_tables

MOVES = 20
"""Actions of an episode."""
SWEEPS = 20
"""Most sweeps over all operators after an action."""
SEEDS = 3
STEPS = 1_000_000
EXPLORING_STEPS = 2000


@dataclass
class ImprovementGame:
    """The game on the tables of a problem."""

    tables: Tables
    start: Integers
    choices: list[tuple[int, int]]
    """(class, strategy) of each action."""
    best_s: float = float("inf")
    episodes: int = 0
    _state: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _moves: int = 0

    def __post_init__(self) -> None:
        self.actions = len(self.choices)
        self.observation_size = self.actions + 1
        self.start_s = self.tables.seconds(self.start)

    def reset(self) -> tuple[Observation, Mask]:
        """Start an episode."""
        self._state, self._moves = self.start.copy(), 0
        return self._observe()

    def step(self, action: int) -> tuple[Observation, Mask, float, bool]:
        """Give an operator a strategy and let the others follow."""
        before, kept = self.tables.seconds(self._state), self._state
        self._state = self._followed(*self.choices[action])
        after = self.tables.seconds(self._state)
        if not np.isfinite(after):
            self._state, after = kept, before
        self.best_s = min(self.best_s, after)
        self._moves += 1
        is_over = self._moves == MOVES
        self.episodes += is_over
        return *self._observe(), (before - after) / self.start_s, is_over

    def _followed(self, anchor: int, strategy: int) -> Integers:
        tables, state = self.tables, self._state.copy()
        state[anchor] = strategy
        for _ in range(SWEEPS):
            is_same = True
            for i in range(len(state)):
                if i == anchor:
                    continue
                near = slice(tables.first_neighbour[i], tables.first_neighbour[i + 1])
                own = tables.own_s[i, : tables.strategies[i]].copy()
                for pair, other in zip(tables.pair_s[near], tables.neighbour[near], strict=True):
                    own += pair[: len(own), state[other]]
                best = int(own.argmin())
                if own[best] < own[state[i]]:
                    state[i], is_same = best, False
            if is_same:
                break
        return state

    def _observe(self) -> tuple[Observation, Mask]:
        chosen = np.array([self._state[i] == s for i, s in self.choices])
        return np.array([*chosen, self._moves / MOVES], dtype=np.float32), ~chosen


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=["wide_classifier"])
    parser.add_argument("--seconds", type=float, default=40.0, help="CPU seconds of one run")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    for model in options.models:
        with torch.device("meta"):
            job = MODELS[model](SIZES[model])
        graph = capture(job, SIZES[model].samples, (8,), model).graph
        for gbytes in (300.0, 12.5):
            prices = Prices(graph, ClusterMesh(one_server(8, gbytes), (8,)), h100())
            records += _compare(prices, gbytes, options.seconds)
            save(options.out, kind="modelled", moves=MOVES, records=records)


def _compare(prices: Prices, gbytes: float, limit_s: float) -> list[dict[str, Any]]:
    graph = prices.graph
    problem = Problem(prices, tie(graph, ()), 0, replicated(graph))
    optimum, tables = solve(problem, 120.0), make_tables(problem)
    rule = plan_by_rule(prices, RULES["data-parallel"], Options())
    assert rule is not None
    members = problem.tied.members
    start = np.array([rule.assignment[0][own[0]] for own in members], dtype=np.int64)
    anchors = [i for i, own in enumerate(members) if _is_anchor(graph.operators[own[0]])]
    choices = [(i, s) for i in anchors for s in range(int(tables.strategies[i]))]
    records = []
    for seed in range(SEEDS):
        for method in ("dqn", "random"):
            game = ImprovementGame(tables, start, choices)
            _play(game, method, seed, limit_s)
            records.append(_record(prices, gbytes, method, game.best_s / optimum.objective_s - 1))
            records[-1] |= {"episodes": game.episodes, "seed": seed, "cpu_seconds": limit_s}
            print(records[-1], flush=True)
        begin = process_time()
        found = anneal(problem, limit_s, seed, optimum.objective_s * (1 + 1e-4))
        gap = max(0.0, found.objective_s / optimum.objective_s - 1)
        records.append(_record(prices, gbytes, "annealing", gap))
        records[-1] |= {"seed": seed, "cpu_seconds": round(process_time() - begin, 2)}
        print(records[-1], flush=True)
    gap = tables.seconds(start) / optimum.objective_s - 1
    return [*records, _record(prices, gbytes, "data-parallel", gap)]


def _record(prices: Prices, gbytes: float, method: str, gap: float) -> dict[str, Any]:
    return {"model": prices.graph.name, "gbytes_per_s": gbytes, "method": method, "gap": gap}


def _is_anchor(operator: Any) -> bool:
    return operator.kind in ("parameter", "input") or operator.flops > 0


def _play(game: ImprovementGame, method: str, seed: int, limit_s: float) -> None:
    until = process_time() + limit_s
    if method == "dqn":
        parameters = DqnParameters(discount=1.0, replay=20_000, epsilon_steps=EXPLORING_STEPS)
        agent = DqnAgent(game.observation_size, game.actions, parameters, seed)
        train(game, agent, STEPS, lambda: process_time() > until)
        return
    random = np.random.default_rng(seed)
    _, mask = game.reset()
    while process_time() < until:
        _, mask, _, is_over = game.step(int(random.choice(np.flatnonzero(mask))))
        if is_over:
            _, mask = game.reset()
