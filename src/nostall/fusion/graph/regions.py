"""Regions: the maximal parts of a graph between opaque nodes, each a graph of its own to fuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from nostall.fusion.graph.decisions import compared_outputs
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.placement import region_levels


@dataclass(frozen=True)
class Region:
    """A part of a captured graph without opaque nodes, as a graph of its own."""

    graph: Graph
    """The region's operators; values from outside the region are its input nodes."""
    origins: tuple[int, ...]
    """``origins[i]`` is the node of the captured graph that node i of ``graph`` stands for."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Nodes of the captured graph, one for each input of ``graph``."""
        return tuple(self.origins[index] for index in self.graph.inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Nodes of the captured graph, one for each output of ``graph``."""
        return tuple(self.origins[index] for index in self.graph.outputs)


def find_regions(
    graph: Graph,
    calls: Mapping[int, object] | None = None,
    input_views: Collection[int] = (),
) -> tuple[Region, ...]:
    """All operators of a graph, in regions that can run one after the other.

    Operators between the same opaque nodes form one region, so no path leaves a region and returns
    to it (:mod:`nostall.fusion.graph.placement`). ``calls`` maps operators to the call they belong
    to; a call is never spread over two regions. A view in ``input_views`` is itself an input of the
    regions that read it, which run after the region that computes the viewed value; for other
    views, the viewed value is the input.
    """
    levels = region_levels(graph, calls or {}, input_views)
    groups: dict[int, list[int]] = {}
    for index in graph.operators:
        groups.setdefault(levels[index], []).append(index)
    regions = [extract_region(graph, groups[level], input_views) for level in sorted(groups)]
    compared = compared_outputs(
        graph, [groups[level] for level in sorted(groups)], [each.outputs for each in regions]
    )
    return tuple(map(_with_compared, regions, compared))


def _with_compared(region: Region, groups: Sequence[Sequence[int]]) -> Region:
    """The region with the groups of nodes of the captured graph that are compared behind it."""
    if not groups:
        return region
    position = {index: at for at, index in enumerate(region.origins)}
    compared = tuple(tuple(position[index] for index in group) for group in groups)
    return replace(region, graph=replace(region.graph, compared=compared))


def extract_region(graph: Graph, operators: list[int], input_views: Collection[int] = ()) -> Region:
    """The operators as a graph of their own, with the views and constants that they read.

    Views in ``input_views`` become inputs.
    """
    chosen = set(operators)

    def is_inside(index: int) -> bool:
        is_copied = graph[index].kind in ("layout", "constant") and index not in input_views
        return is_copied or index in chosen

    needed: set[int] = set()
    pending = list(operators)
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            if is_inside(index):
                pending.extend(graph[index].inputs)
    origins = sorted(needed)
    position = {index: at for at, index in enumerate(origins)}
    nodes = []
    for index in origins:
        node = graph[index]
        if is_inside(index):
            inputs = tuple(position[i] for i in node.inputs)
            nodes.append(replace(node, index=position[index], inputs=inputs))
        else:
            input_node = replace(node, op="input", inputs=(), attributes=())
            nodes.append(replace(input_node, index=position[index]))
    outputs = tuple(
        position[index]
        for index in operators
        if index in graph.results or not chosen.issuperset(graph.consumers[index])
    )
    return Region(Graph(tuple(nodes), outputs, graph.varying), tuple(origins))
