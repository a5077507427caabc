"""Maximal regions between opaque nodes: what fusion decides about at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.placement import levels as sunk


@dataclass(frozen=True)
class Region:
    """A part of a whole graph without opaque nodes.

    ``graph`` is closed: what it reads from outside are its input nodes.  ``origins[i]`` is the node
    of the whole graph that its node i stands for.
    """

    graph: Graph
    origins: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Nodes of the whole graph, one for each input of ``graph``."""
        return tuple(self.origins[index] for index in self.graph.inputs)

    @property
    def gives(self) -> tuple[int, ...]:
        """Nodes of the whole graph, one for each output of ``graph``."""
        return tuple(self.origins[index] for index in self.graph.outputs)


def regions(
    whole: Graph,
    calls: Mapping[int, object] | None = None,
    given: Collection[int] = (),
) -> tuple[Region, ...]:
    """All operators of the graph, in regions that can run one after the other.

    Operators between the same opaque nodes form one region, so no path leaves a region and comes
    back (:mod:`nostall.fusion.graph.placement`).  ``calls`` says which operators belong to the same call,
    if that is to be computed as a whole; ``given`` are views that regions take as inputs, instead
    of what they show.
    """
    levels = sunk(whole, calls or {})
    groups: dict[int, list[int]] = {}
    for index in whole.operators:
        groups.setdefault(levels[index], []).append(index)
    return tuple(region(whole, groups[level], given) for level in sorted(groups))


def region(whole: Graph, operators: list[int], given: Collection[int] = ()) -> Region:
    """The operators as a graph of their own, with the views and constants that they read; the views
    that are ``given`` are inputs."""
    chosen = set(operators)

    def inside(index: int) -> bool:
        carried = whole[index].kind in ("layout", "constant") and index not in given
        return carried or index in chosen

    needed: set[int] = set()
    waiting = list(operators)
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            if inside(index):
                waiting.extend(whole[index].inputs)
    order = sorted(needed)
    place = {index: at for at, index in enumerate(order)}
    nodes = []
    for index in order:
        node = whole[index]
        if inside(index):
            inputs = tuple(place[i] for i in node.inputs)
            nodes.append(replace(node, index=place[index], inputs=inputs))
        else:
            outside = replace(node, op="input", inputs=(), attributes=())
            nodes.append(replace(outside, index=place[index]))
    outputs = tuple(
        place[index]
        for index in operators
        if index in whole.results or not chosen.issuperset(whole.consumers[index])
    )
    return Region(Graph(tuple(nodes), outputs, whole.varying), tuple(order))
