"""Graphs with further copies of operators, so that several kernels can compute one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.shapes import Shape, contiguous_strides

Group = tuple[int, ...]
"""The operators of a kernel, ascending."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of a region: their operators in a graph that may have copies of the region's."""

    graph: Graph
    """Its inputs and outputs are those of the region's graph, in order."""
    groups: tuple[Group, ...]
    origins: tuple[int | None, ...]
    """The node of the region's graph that has the same value as each node; None if there is none,
    which happens for parts of values."""

    @classmethod
    def of(cls, graph: Graph, groups: Sequence[Group]) -> Kernels:
        """Kernels without copies."""
        return cls(graph, tuple(map(tuple, groups)), tuple(range(len(graph))))

    def in_region(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """The nodes of the region's graph that these nodes stand for, which must exist."""
        found = tuple(self.origins[index] for index in nodes)
        return tuple(index for index in found if index is not None)

    @property
    def store_known_values(self) -> bool:
        """Whether all values that kernels exchange are values of the region's graph."""
        owner = {index: at for at, group in enumerate(self.groups) for index in group}
        return all(
            self.origins[index] is not None
            for index, at in owner.items()
            if index in self.graph.results
            or any(owner.get(reader) != at for reader in self.graph.consumers[index])
        )


class GraphCopier:
    """Builds a graph from the nodes of another one, in order, and from copies of them."""

    def __init__(self, graph: Graph, origins: Sequence[int | None]) -> None:
        """``origins``: what the nodes of ``graph`` stand for; the nodes of the copy inherit it."""
        self.graph = graph
        self.position: dict[int, int] = {}
        """The node of the copy for each node of ``graph`` that was kept."""
        self._nodes: list[Node] = []
        self._given = origins
        self._origins: list[int | None] = []

    def keep(self, index: int, inputs: Sequence[int]) -> int:
        """Add a node of the graph with these operands of the copy."""
        self.position[index] = self.copy(index, inputs)
        return self.position[index]

    def copy(self, index: int, inputs: Sequence[int], shape: Shape | None = None) -> int:
        """Add a copy of a node; with another shape it stands for no node of the region."""
        node = replace(self.graph[index], inputs=tuple(inputs))
        if shape is None:
            return self.add(node, self._given[index])
        return self.add(replace(node, shape=shape, strides=contiguous_strides(shape)))

    def add(self, node: Node, origin: int | None = None) -> int:
        """Add a node, whatever its index; returns its index."""
        self._nodes.append(replace(node, index=len(self._nodes)))
        self._origins.append(origin)
        return len(self._nodes) - 1

    def finish(self) -> tuple[Graph, tuple[int | None, ...]]:
        """The graph, with the outputs of the other one, and what its nodes stand for."""
        outputs = tuple(self.position[index] for index in self.graph.outputs)
        return Graph(tuple(self._nodes), outputs, self.graph.varying), tuple(self._origins)
