"""Order in which a device runs a sharding plan: operators, and redistributions beside them.

Redistributions of two kinds run beside the operators, one after the other, as FSDP2's do:

- those of parameters and of the batch start :data:`PREFETCH` redistributions ahead of their
  consumers; small parameters that need the same gather share one;
- those of gradients start when the gradient exists, and end with the step.  Small gradients that
  need the same collective share one, a bucket, as in PyTorch's DDP.

An operator waits for all other redistributions of its inputs.  The cost model and the execution
follow the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    ShardingGraph,
    input_placements,
    output_placements,
)
from nostall.parallel.sharding.placements import COLLECTIVES, Step, local_shape, redistribution

PREFETCH = 3
"""Redistributions of parameters that are under way or done before their consumer runs."""
BUCKET_BYTES = 25 * 2**20
"""Bytes of local gradients at which a bucket is full; larger gradients have a collective of their
own.  The number is DDP's."""

SMALL_BYTES = 2**20
"""Bytes of a gathered parameter that has a gather of its own from this size on."""
BUNDLE_BYTES = 8 * 2**20
"""Gathered bytes at which a gather of small parameters is full: they stay in memory until they are
read."""


@dataclass(frozen=True, slots=True)
class Run:
    """An operator runs, after redistributions of its inputs that did not start before."""

    operator: int


@dataclass(frozen=True, slots=True)
class Start:
    """A redistribution starts beside the operators: of one tensor, or of a bucket."""

    edges: tuple[Edge, ...]


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
    before: dict[int, list[tuple[Edge, ...]]] = {}
    bundles = _bundles(graph, assignment, weights)
    for i, bundle in enumerate(bundles):
        first = bundles[i - PREFETCH][0].consumer if i >= PREFETCH else order[len(early)]
        before.setdefault(first, []).append(bundle)
    after: dict[int, list[tuple[Edge, ...]]] = {}
    for bucket in _buckets(graph, assignment, sorted(gradients, key=lambda e: e.tensor)):
        after.setdefault(bucket[-1].producer, []).append(bucket)
    actions: list[Action] = []
    for number in order:
        actions += map(Start, before.get(number, []))
        actions.append(Run(number))
        actions += map(Start, after.get(number, []))
    return Schedule(tuple(actions), tuple(map(tuple, edges)), frozenset({*weights, *gradients}))


def _bundles(
    graph: ShardingGraph, assignment: Assignment, weights: list[Edge]
) -> list[tuple[Edge, ...]]:
    """What is gathered, in the order of its first consumers; small parameters together."""

    def placed(edge: Edge) -> tuple[Hashable | None, int]:
        info, target = graph.tensors[edge.tensor], input_placements(graph, assignment, edge)
        step = shared_step(graph, assignment, edge)
        size = math.prod(local_shape(info.shape, target, graph.mesh) or ()) * info.itemsize
        if step is None or step.kind != "all-gather" or size >= SMALL_BYTES:
            return None, size
        return (step.mesh_dim, info.dtype, graph.operators[edge.consumer].is_forward), size

    return _grouped(weights, placed, BUNDLE_BYTES)


def _buckets(
    graph: ShardingGraph, assignment: Assignment, gradients: list[Edge]
) -> list[tuple[Edge, ...]]:
    """Gradients in their order, with those together that share a collective."""

    def placed(edge: Edge) -> tuple[Hashable | None, int]:
        info, source = graph.tensors[edge.tensor], output_placements(graph, assignment, edge.tensor)
        step = bucket_step(graph, assignment, edge)
        size = math.prod(local_shape(info.shape, source, graph.mesh) or ()) * info.itemsize
        if step is None or size >= BUCKET_BYTES:
            return None, size
        return (step.kind, step.mesh_dim, step.source, info.dtype), size

    groups = _grouped(gradients, placed, BUCKET_BYTES)
    return sorted(groups, key=lambda bucket: bucket[-1].tensor)


def _grouped(
    edges: list[Edge], placed: Callable[[Edge], tuple[Hashable | None, int]], most: int
) -> list[tuple[Edge, ...]]:
    """Groups of edges that share a collective, in the order of their first edges.

    ``placed`` gives what the edges of a group have in common, None for an edge by itself, and an
    edge's bytes.  A group takes edges until it has ``most`` bytes.
    """
    groups: list[list[Edge]] = []
    unfilled: dict[Hashable, tuple[list[Edge], int]] = {}
    for edge in edges:
        key, size = placed(edge)
        if key is None:
            groups.append([edge])
            continue
        group, filled = unfilled.pop(key, ([], 0))
        if not group:
            groups.append(group)
        group.append(edge)
        if filled + size < most:
            unfilled[key] = (group, filled + size)
    return list(map(tuple, groups))


def bucket_step(graph: ShardingGraph, assignment: Assignment, edge: Edge) -> Step | None:
    """The only step of a gradient's redistribution if buckets can have it: a sum over devices."""
    step = shared_step(graph, assignment, edge)
    return step if step and step.kind in ("all-reduce", "reduce-scatter") else None


def shared_step(graph: ShardingGraph, assignment: Assignment, edge: Edge) -> Step | None:
    """The only step of an edge's redistribution if several edges can share it."""
    source = output_placements(graph, assignment, edge.tensor)
    steps = redistribution(source, input_placements(graph, assignment, edge)) or ()
    kinds = ("all-reduce", "reduce-scatter", "all-gather")
    return steps[0] if len(steps) == 1 and steps[0].kind in kinds else None


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
