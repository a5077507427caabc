"""Annealing over strategies whose moves are trees: the fall-back if the program is not solved.

A move takes random classes that form a forest in the graph and draws all of their strategies at
once, given those of the other classes, by a dynamic programme along the trees (Hamze and de Freitas
2004, "From fields to trees").  At temperature 0 it takes the best.  Single moves get stuck, because
a changed placement pays only if its neighbours change as well.

A problem as arrays: seconds of each class and strategy, and of each pair of neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numba
import numpy as np
from numpy.typing import NDArray

from nostall.parallel.sharding.planners.integer_program import Problem, Solution, edge_share
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


HOTTEST = (1e-3, 1e-2, 1e-1, 1.0)
"""Temperatures at which a run starts, as shares of the seconds of the start; one after another."""
COLDEST = 1e-6
"""Temperature of its last moves but those at 0, likewise."""
GREEDY = 0.9
"""Share of a run after which moves take the best."""
MOVES = 1500
"""Moves of a run."""


def anneal(problem: Problem, seconds: float, seed: int = 0, stop_s: float = 0.0) -> Solution:
    """The best of several runs within ``seconds``; stops at ``stop_s`` modelled seconds.

    The start is the replicated assignment.  The problem's memory limit does not count.
    """
    begin = monotonic()
    tables = make_tables(problem)
    random = np.random.default_rng(seed)
    best = np.zeros(len(tables.strategies), dtype=np.int64)
    best_s = start_s = tables.seconds(best)
    run = 0
    while best_s > stop_s and (run == 0 or monotonic() - begin < seconds):
        state = best.copy() if run % 2 else np.zeros_like(best)
        hottest = HOTTEST[run // 2 % len(HOTTEST)] * start_s
        for move in range(MOVES):
            done = move / MOVES
            temperature = hottest * (COLDEST * start_s / hottest) ** (done / GREEDY)
            order = random.permutation(len(state))
            _redraw_forest(
                state, order, temperature if done < GREEDY else 0.0, int(random.integers(1 << 31)),
                tables.strategies, tables.own_s, tables.first_neighbour, tables.neighbour,
                tables.pair_s,
            )  # fmt: skip
        found_s = tables.seconds(state)
        if found_s < best_s:
            best, best_s = state, found_s
        run += 1
    numbers = tuple(int(best[number]) for number in problem.tied.class_of)
    return Solution(
        numbers, best_s, 0.0, False, len(tables.own_s), len(tables.neighbour), monotonic() - begin
    )


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _redraw_forest(
    state: Integers,
    order: Integers,
    temperature: float,
    seed: int,
    strategies: Integers,
    own_s: Floats,
    first_neighbour: Integers,
    neighbour: Integers,
    pair_s: Floats,
) -> None:
    """Draw the strategies of a random forest in place, given those of all other classes."""
    np.random.seed(seed)
    visits, up = _random_forest(order, first_neighbour, neighbour)
    in_forest = np.zeros(len(state), np.bool_)
    in_forest[visits] = True
    cost = own_s.copy()
    for i in visits:
        for k in range(first_neighbour[i], first_neighbour[i + 1]):
            if not in_forest[neighbour[k]]:
                cost[i] += pair_s[k, :, state[neighbour[k]]]
    for i in visits[::-1]:  # from the leaves to the roots
        if up[i] >= 0:
            for y in range(strategies[neighbour[up[i]]]):
                own = cost[i, : strategies[i]] + pair_s[up[i], : strategies[i], y]
                cost[neighbour[up[i]], y] += _soft_minimum(own, temperature)
    for i in visits:  # from the roots to the leaves
        own = cost[i, : strategies[i]]
        if up[i] >= 0:
            own = own + pair_s[up[i], : strategies[i], state[neighbour[up[i]]]]
        state[i] = _draw(own, temperature)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _random_forest(
    order: Integers, first_neighbour: Integers, neighbour: Integers
) -> tuple[Integers, Integers]:
    """Classes of a maximal forest, parents first, and for each the place of its parent or -1.

    A class joins if its neighbours in the forest are in different trees.
    """
    count = len(order)
    tree = np.arange(count)  # union-find over trees
    joined = np.zeros(count, np.bool_)
    seen = np.full(count, -1)
    for i in order:
        is_free = True
        for k in range(first_neighbour[i], first_neighbour[i + 1]):
            if joined[neighbour[k]]:
                root = _root(tree, neighbour[k])
                if seen[root] == i:
                    is_free = False
                    break
                seen[root] = i
        if is_free:
            joined[i] = True
            for k in range(first_neighbour[i], first_neighbour[i + 1]):
                if joined[neighbour[k]]:
                    tree[_root(tree, neighbour[k])] = i
    visits, up = np.empty(count, np.int64), np.full(count, -1)
    is_visited = np.zeros(count, np.bool_)
    end = done = 0
    for first in order:
        if joined[first] and not is_visited[first]:
            is_visited[first] = True
            visits[end] = first
            end += 1
        while done < end:
            i = visits[done]
            done += 1
            for k in range(first_neighbour[i], first_neighbour[i + 1]):
                child = neighbour[k]
                if joined[child] and not is_visited[child]:
                    is_visited[child] = True
                    visits[end] = child
                    end += 1
                    for back in range(first_neighbour[child], first_neighbour[child + 1]):
                        if neighbour[back] == i:
                            up[child] = back
    return visits[:end], up


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _root(tree: Integers, number: int) -> int:
    while tree[number] != number:
        tree[number] = tree[tree[number]]
        number = tree[number]
    return number


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _soft_minimum(cost: Floats, temperature: float) -> float:
    """-T log(sum(exp(-cost / T))); the minimum at temperature 0."""
    least: float = cost.min()
    if temperature <= 0.0 or least == np.inf:
        return least
    soft: float = least - temperature * np.log(np.exp((least - cost) / temperature).sum())
    return soft


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _draw(cost: Floats, temperature: float) -> int:
    """A place with probability proportional to exp(-cost / T); the first best at temperature 0."""
    best = int(np.argmin(cost))
    if temperature <= 0.0:
        return best
    weights = np.cumsum(np.exp((cost[best] - cost) / temperature))
    return int(np.searchsorted(weights, np.random.random() * weights[-1], side="right"))
