"""Costs of a problem as arrays: of each class and strategy, and of each edge and pair of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.sharding.planners.integer_program import Problem
from nostall.parallel.sharding.planners.tied import EdgeClass

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bits = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Tables:
    """Seconds of classes and edges; infinite for what is not possible.

    The pair (a, b) of strategies of the producer and the consumer of edge e is at
    ``first_pair[e] + a * strategies[consumer[e]] + b``.
    """

    strategies: Integers
    """Number of strategies of each class."""
    first_strategy: Integers
    """Place of a class's first strategy in ``class_s``."""
    class_s: Floats
    producer: Integers
    """Class that each edge starts from."""
    consumer: Integers
    first_pair: Integers
    pair_s: Floats
    is_equal: Bits
    """Whether a pair needs no redistribution."""
    first_edge: Integers
    """Place of a class's first edge in ``edges_of``; one entry more than classes."""
    edges_of: Integers
    """Edges of each class, in both directions."""

    def seconds(self, state: Integers) -> float:
        """Seconds of a state, the number of the strategy of each class; may be infinite."""
        chosen = self.class_s[self.first_strategy + state]
        producer, consumer = state[self.producer], state[self.consumer]
        pairs = self.first_pair + producer * self.strategies[self.consumer] + consumer
        return float(chosen.sum() + self.pair_s[pairs].sum())


def make_tables(problem: Problem) -> Tables:
    """Tables of a problem; its memory limit is not part of them."""
    graph, tied = problem.prices.graph, problem.tied
    strategies, class_s = [], list[float]()
    first_strategy = []
    for members in tied.members:
        operator = graph.operators[members[0]]
        count = len(operator.strategies[problem.mesh_dim])
        strategies.append(count)
        first_strategy.append(len(class_s))
        for number in range(count):
            seconds = problem.prices.operator_s(operator, problem.strategies(members[0], number))
            is_allowed = problem.allowed is None or all(
                number in problem.allowed[member] for member in members
            )
            possible = seconds is not None and is_allowed
            class_s.append((seconds or 0.0) * len(members) if possible else np.inf)
    first_pair, pair_s, is_equal = [], list[float](), list[bool]()
    edges_of: list[list[int]] = [[] for _ in tied.members]
    for number, edge in enumerate(tied.edges):
        first_pair.append(len(pair_s))
        _add_pairs(problem, edge, pair_s, is_equal)
        for side in dict.fromkeys((edge.producer, edge.consumer)):
            edges_of[side].append(number)
    starts = np.cumsum([0, *map(len, edges_of)])
    return Tables(
        np.array(strategies),
        np.array(first_strategy),
        np.array(class_s),
        np.array([edge.producer for edge in tied.edges]),
        np.array([edge.consumer for edge in tied.edges]),
        np.array(first_pair),
        np.array(pair_s),
        np.array(is_equal),
        starts,
        np.array([edge for own in edges_of for edge in own]),
    )


def _add_pairs(
    problem: Problem, edge: EdgeClass, pair_s: list[float], is_equal: list[bool]
) -> None:
    """Append the seconds of an edge for each pair of strategies."""
    graph, example, mesh_dim = problem.prices.graph, edge.example, problem.mesh_dim
    info = graph.tensors[example.tensor]
    counts = [
        len(graph.operators[number].strategies[mesh_dim])
        for number in (example.producer, example.consumer)
    ]
    sources = [
        tuple(s.outputs[example.output] for s in problem.strategies(example.producer, number))
        for number in range(counts[0])
    ]
    targets = [
        tuple(s.inputs[example.position] for s in problem.strategies(example.consumer, number))
        for number in range(counts[1])
    ]
    for source in sources:
        for target in targets:
            steps = problem.prices.redistribution(info, source, target)
            possible = steps is not None
            seconds = sum(step.seconds for step in steps or ()) * edge.count
            pair_s.append(seconds if possible else np.inf)
            is_equal.append(possible and not steps)
