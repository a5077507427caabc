"""Order in which a device runs a sharding plan: operators, and redistributions beside them.

Redistributions of two kinds run beside the operators, one after the other, as FSDP2's do:

- those of parameters and of the batch start :data:`PREFETCH` redistributions ahead of their
  consumers;
- those of gradients start when the gradient exists, and end with the step.

An operator waits for all other redistributions of its inputs.  The cost model and the execution
follow the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    ShardingGraph,
    input_placements,
    output_placements,
)
from nostall.parallel.sharding.placements import COLLECTIVES, redistribution

PREFETCH = 3
"""Redistributions of parameters that are under way or done before their consumer runs."""


@dataclass(frozen=True, slots=True)
class Run:
    """An operator runs, after redistributions of its inputs that did not start before."""

    operator: int


@dataclass(frozen=True, slots=True)
class Start:
    """A redistribution starts beside the operators."""

    edge: Edge


Action = Run | Start


@dataclass(frozen=True)
class Schedule:
    """Actions of a device in their order; all devices have the same."""

    actions: tuple[Action, ...]
    edges: tuple[tuple[Edge, ...], ...]
    """For each operator, one edge for each input."""
    started: frozenset[Edge]
    """Edges whose redistribution runs beside the operators."""


def schedule(graph: ShardingGraph, assignment: Assignment) -> Schedule:
    """The schedule of a plan that is possible."""
    edges: list[list[Edge]] = [[] for _ in graph.operators]
    for edge in graph.edges:
        edges[edge.consumer].append(edge)
    sending = {edge for edge in graph.edges if _sends(graph, assignment, edge)}
    early = _early_operators(graph, edges, sending)
    order = [*sorted(early), *(n for n in range(len(graph.operators)) if n not in early)]
    gradients = {e for e in sending if graph.operators[e.consumer].kind == "parameter"}
    place = {number: i for i, number in enumerate(order)}
    weights = sorted(
        (e for e in sending if e.producer in early and e not in gradients),
        key=lambda e: (place[e.consumer], e.position),
    )
    before: dict[int, list[Edge]] = {}
    for i, edge in enumerate(weights):
        first = weights[i - PREFETCH].consumer if i >= PREFETCH else order[len(early)]
        before.setdefault(first, []).append(edge)
    after: dict[int, list[Edge]] = {}
    for edge in sorted(gradients, key=lambda e: e.tensor):
        after.setdefault(edge.producer, []).append(edge)
    actions: list[Action] = []
    for number in order:
        actions += map(Start, before.get(number, []))
        actions.append(Run(number))
        actions += map(Start, after.get(number, []))
    return Schedule(tuple(actions), tuple(map(tuple, edges)), frozenset({*weights, *gradients}))


def may_overlap(graph: ShardingGraph, edge: Edge) -> bool:
    """Whether a redistribution of an edge can run beside the operators in some plan."""
    is_gradient = graph.operators[edge.consumer].kind == "parameter"
    return is_gradient or edge.producer in graph.stored_operators


def _sends(graph: ShardingGraph, assignment: Assignment, edge: Edge) -> bool:
    """Whether the redistribution of an edge has a collective."""
    source = output_placements(graph, assignment, edge.tensor)
    steps = redistribution(source, input_placements(graph, assignment, edge))
    return any(step.kind in COLLECTIVES for step in steps or ())


def _early_operators(graph: ShardingGraph, edges: list[list[Edge]], sending: set[Edge]) -> set[int]:
    """Sources, and views of parameters as they are stored; these run at the start of the step."""
    early: set[int] = set()
    for number in graph.stored_operators:
        own = edges[number] if graph.operators[number].kind != "parameter" else []
        if all(edge.producer in early and edge not in sending for edge in own):
            early.add(number)
    return early
