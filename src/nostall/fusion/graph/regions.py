"""Regions: the maximal parts of a graph between opaque nodes, each a graph of its own to fuse.

Operators are placed into regions so that few bytes move. An operator can run after the opaque nodes
it depends on and must run before those that depend on it. In between, its region is free to choose.
The derivative of an activation, for example, needs only what the forward pass saved, so it could be
the first thing that a backward pass computes. It would then be written to memory, and read again
after the matrix product whose result it scales. Computing it in the region after that product saves
both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.fusion.graph.decisions import compared_outputs
from nostall.fusion.graph.dynamic_size import used_sizes
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE

Unit = tuple[int, ...]
"""Nodes that are placed together: the operators of one call, or a single node."""


def region_levels(
    graph: Graph, calls: Mapping[int, object], input_views: Collection[int] = ()
) -> list[int]:
    """The level of each node. The operators of one level form a region; regions run by level.

    An opaque node runs after the region of its level and before the next region. Each operator
    starts on its lowest possible level (the largest number of opaque nodes on a path to it) and
    sinks to the first operator that reads it if that moves fewer bytes. ``calls`` maps operators to
    the call they belong to; the operators of one call get the same level. What reads a value by a
    view in ``input_views`` is on a higher level than the value.
    """
    units = _Units(graph, calls, frozenset(input_views))
    sinking = {unit for unit in units.all if unit[0] in units.operators}
    while True:
        levels = _sunk_levels(units, sinking)
        costlier = _costlier_units(units, levels)
        if not costlier:
            return levels
        sinking -= costlier


def _sunk_levels(units: _Units, sinking: set[Unit]) -> list[int]:
    """Levels if the units in ``sinking`` sink to their first reader and all others stay lowest."""
    levels = list(units.lowest_levels)
    for unit in reversed(units.all):
        if unit in sinking:
            readers = [levels[i] - units.is_viewed(unit, (i,)) for i in units.readers(unit)]
            for index in unit:
                levels[index] = min(readers, default=levels[index])
    return levels


def _costlier_units(units: _Units, levels: list[int]) -> set[Unit]:
    """The sunk units that move at least as many bytes as on their lowest level.

    On its lowest level, a unit writes its results, and its reader's region reads them. On its sunk
    level, the unit instead reads what it needs there. Values that are computed in the same region
    cost nothing. Of the others, only those count that the region of the lowest level computes or
    reads anyway: the rest would have to be read on either level.
    """
    graph, stored = units.graph, units.stored
    needs: dict[int, frozenset[int]] = {}
    costlier: set[Unit] = set()

    def moved_bytes(nodes: Iterable[int]) -> int:
        return sum(graph[i].bytes * (1 if i in stored else 2) for i in nodes)

    def is_available(index: int, level: int) -> bool:
        nodes = (index, *graph.consumers[index])
        return level in {levels[i] for i in nodes if i in units.operators}

    for unit in units.all:
        level, lowest = levels[unit[0]], units.lowest_levels[unit[0]]
        reads: frozenset[int] = frozenset()
        for index in units.sources(unit):
            is_computed_here = levels[index] == level and index not in stored
            reads |= needs[index] if is_computed_here else frozenset((index,))
        needs |= dict.fromkeys(unit, reads)
        results = (i for i in unit if any(user not in unit for user in graph.consumers[i]))
        extra_reads = (i for i in reads if is_available(i, lowest))
        if level > lowest and moved_bytes(extra_reads) >= moved_bytes(results):
            costlier.add(unit)
    return costlier


@dataclass(frozen=True)
class _Units:
    """A graph's operators and opaque nodes as units in topological order."""

    graph: Graph
    calls: Mapping[int, object]
    """The call of each operator that belongs to one."""
    input_views: frozenset[int] = frozenset()
    """Views that are inputs of regions."""

    @cached_property
    def all(self) -> tuple[Unit, ...]:
        units: list[list[int]] = []
        previous: object = None
        for node in self.graph:
            if node.index not in self.operators and node.kind != "opaque":
                continue
            call = self.calls.get(node.index)
            if call is not None and call is previous:
                units[-1].append(node.index)
            else:
                units.append([node.index])
            previous = call
        return tuple(map(tuple, units))

    @cached_property
    def operators(self) -> frozenset[int]:
        return frozenset(self.graph.operators)

    def sources(self, unit: Unit) -> set[int]:
        return {i for index in unit for i in self.graph.sources[index]}.difference(unit)

    def readers(self, unit: Unit) -> set[int]:
        return {i for index in unit for i in self.graph.consumers[index]}.difference(unit)

    def is_viewed(self, sources: Unit, readers: Unit) -> bool:
        """Whether a view that is an input of regions is between operators and their readers."""
        return any((i, j) in self.read_by_input_views for i in sources for j in readers)

    @cached_property
    def read_by_input_views(self) -> frozenset[tuple[int, int]]:
        """Pairs of an operator and a node that reads it by a view that is an input of regions."""
        graph = self.graph
        pairs: set[tuple[int, int]] = set()
        for reader in (node for node in graph if self.input_views and node.kind != "layout"):
            for index in reader.inputs:
                is_read = False
                while graph[index].kind == "layout":
                    is_read |= index in self.input_views
                    index = graph[index].inputs[0]
                if is_read and index in self.operators:
                    pairs.add((index, reader.index))
        return frozenset(pairs)

    @cached_property
    def lowest_levels(self) -> list[int]:
        """For each node: the largest number of opaque nodes and input views on a path to it."""
        levels = [0] * len(self.graph)
        for unit in self.all:
            above = (
                levels[i] + (self.graph[i].kind == "opaque" or self.is_viewed((i,), unit))
                for i in self.sources(unit)
            )
            level = max(above, default=0)
            for index in unit:
                levels[index] = level
        return levels

    @cached_property
    def stored(self) -> frozenset[int]:
        """Nodes that are in memory for any placement: non-operators, results, opaque operands.

        So are operators that are read by views that are inputs of regions.
        """
        graph = self.graph
        viewed = {index for index, _ in self.read_by_input_views}
        return frozenset(
            node.index
            for node in graph
            if node.kind not in COMPUTE
            or node.index in graph.results
            or node.index in viewed
            or any(graph[user].kind == "opaque" for user in graph.consumers[node.index])
        )


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
    to it (:mod:`nostall.fusion.graph.regions`). ``calls`` maps operators to the call they belong
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
    # Regions of several sizes have those that they depend on, and equal regions have equal ones.
    varying = used_sizes((n for node in nodes for n in (*node.shape, *node.strides)), graph.varying)
    return Region(Graph(tuple(nodes), outputs, varying), tuple(origins))
