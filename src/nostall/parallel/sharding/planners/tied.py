"""Classes of operators that get the same strategy, such as those of repeated layers.

Two operators are tied if their neighbourhoods in the graph are equal up to a radius (colour
refinement, Weisfeiler and Leman 1968).  Layers at the borders of a repetition have other
neighbours, so they may get other strategies.  No names of modules are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from nostall.parallel.sharding.graph import Assignment, Edge, ShardingGraph

UNTIED_OPERATORS = 900
"""Graphs with at most this many operators are not tied."""
RADIUS = 6
"""Edges to the farthest operators that are compared."""


@dataclass(frozen=True)
class EdgeClass:
    """Edges between the same classes at the same positions."""

    example: Edge
    producer: int
    """Number of the class."""
    consumer: int
    count: int


@dataclass(frozen=True)
class TiedGraph:
    """A graph whose operators are grouped into classes."""

    graph: ShardingGraph
    class_of: tuple[int, ...]
    """For each operator, the number of its class."""
    members: tuple[tuple[int, ...], ...]
    """For each class, its operators."""
    edges: tuple[EdgeClass, ...]


def tie(graph: ShardingGraph, fixed: Assignment = (), radius: int | None = None) -> TiedGraph:
    """Group the operators of a graph.

    ``fixed`` holds strategies on mesh dimensions that stay as they are; operators with different
    ones are not tied.  ``radius`` None is :data:`RADIUS`, or no tying for small graphs.
    """
    count = len(graph.operators)
    if radius is None and count <= UNTIED_OPERATORS:
        class_of = list(range(count))
    else:
        class_of = _refine(graph, fixed, RADIUS if radius is None else radius)
    members: list[list[int]] = [[] for _ in range(max(class_of) + 1)]
    for operator, number in enumerate(class_of):
        members[number].append(operator)
    groups: dict[tuple[int, ...], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        key = (class_of[edge.producer], edge.output, class_of[edge.consumer], edge.position)
        groups[key].append(edge)
    edges = tuple(EdgeClass(found[0], key[0], key[2], len(found)) for key, found in groups.items())
    return TiedGraph(graph, tuple(class_of), tuple(map(tuple, members)), edges)


def _refine(graph: ShardingGraph, fixed: Assignment, radius: int) -> list[int]:
    """Class numbers after ``radius`` rounds of colour refinement."""
    colours = _numbered(
        (o.kind, o.signature, len(o.inputs), len(o.outputs), tuple(f[i] for f in fixed))
        for i, o in enumerate(graph.operators)
    )
    ends = [(e.consumer, e.producer, e.position, e.output) for e in graph.edges]
    for _ in range(radius):
        neighbours: list[list[tuple[int, int, int, int]]] = [[] for _ in colours]
        for consumer, producer, position, output in ends:
            neighbours[consumer].append((0, position, output, colours[producer]))
            neighbours[producer].append((1, output, position, colours[consumer]))
        colours = _numbered(
            (own, *sorted(near)) for own, near in zip(colours, neighbours, strict=True)
        )
    return colours


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Equal numbers for equal values, in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
