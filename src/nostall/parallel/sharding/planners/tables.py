"""A problem as arrays: seconds of each class and strategy, and of each pair of neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.sharding.planners.integer_program import Problem, edge_share
from nostall.parallel.sharding.planners.tied import EdgeClass

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tables:
    """Seconds by class, strategy and neighbour; infinite for what is not possible.

    Neighbour ``k`` of class ``i`` is at ``first_neighbour[i] + k``.  Rows of its table are the
    strategies of ``i``, columns those of the neighbour.
    """

    strategies: Integers
    """Number of strategies of each class."""
    own_s: Floats
    """Seconds of each class and strategy; shape (classes, most strategies)."""
    first_neighbour: Integers
    """One entry more than classes."""
    neighbour: Integers
    pair_s: Floats
    """Shape (neighbours of all classes, most strategies, most strategies)."""

    def seconds(self, state: Integers) -> float:
        """Seconds of a state, the number of the strategy of each class."""
        classes = np.arange(len(state))
        sources = np.repeat(classes, np.diff(self.first_neighbour))
        pairs = self.pair_s[np.arange(len(sources)), state[sources], state[self.neighbour]]
        return float(self.own_s[classes, state].sum() + pairs.sum() / 2)  # each pair is there twice


def make_tables(problem: Problem) -> Tables:
    """Tables of a problem; its memory limit is not part of them."""
    graph, tied = problem.prices.graph, problem.tied
    operators = [graph.operators[members[0]] for members in tied.members]
    counts = [len(operator.strategies[problem.mesh_dim]) for operator in operators]
    own_s = np.full((len(counts), max(counts)), np.inf)
    for number, members in enumerate(tied.members):
        for strategy in range(counts[number]):
            if problem.allowed is None or all(strategy in problem.allowed[m] for m in members):
                chosen = problem.strategies(members[0], strategy)
                seconds = problem.prices.operator_s(operators[number], chosen)
                if seconds is not None:
                    own_s[number, strategy] = seconds * len(members)
    pairs: dict[tuple[int, int], Floats] = {}
    for edge in tied.edges:
        table = _edge_table(problem, edge, max(counts))
        if edge.producer == edge.consumer:  # a class that reads its own result
            own_s[edge.producer] += np.diag(table)
            continue
        for key, own in (
            ((edge.producer, edge.consumer), table),
            ((edge.consumer, edge.producer), table.T),
        ):
            pairs[key] = pairs[key] + own if key in pairs else own
    keys = sorted(pairs)
    degrees = np.bincount([a for a, _ in keys], minlength=len(counts))
    return Tables(
        np.array(counts),
        own_s,
        np.concatenate([[0], np.cumsum(degrees)]),
        np.array([b for _, b in keys], dtype=np.int64),
        np.stack([pairs[key] for key in keys]),
    )


def _edge_table(problem: Problem, edge: EdgeClass, width: int) -> Floats:
    """Seconds of an edge for each pair of strategies of its producer and its consumer."""
    graph, example = problem.prices.graph, edge.example
    info, share = graph.tensors[example.tensor], edge_share(problem, example)
    producer, consumer = (
        len(graph.operators[number].strategies[problem.mesh_dim])
        for number in (example.producer, example.consumer)
    )
    table = np.full((width, width), np.inf)
    targets = [
        tuple(s.inputs[example.position] for s in problem.strategies(example.consumer, b))
        for b in range(consumer)
    ]
    for a in range(producer):
        chosen = problem.strategies(example.producer, a)
        source = tuple(s.outputs[example.output] for s in chosen)
        for b, target in enumerate(targets):
            steps = problem.prices.redistribution(info, source, target)
            if steps is not None:
                table[a, b] = share * sum(step.seconds for step in steps) * edge.count
    return table
