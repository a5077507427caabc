"""Graphs with further copies of operators, so that several kernels can compute one value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.shapes import Shape, contiguous_strides

Group = tuple[int, ...]
"""The operators of a kernel, ascending."""
MAX_COPIES = 16
"""Most elementwise operators that may be computed again to replace a slice or a shared value."""
NOT_COPIED = frozenset({"random", "checked_index"})
"""Elementwise operators that are never copied: numbers depend on the position in the whole tensor,
and an index is checked once."""


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
        """Make kernels from a partition of the graph's own operators.

        No operator is computed twice.
        """
        return cls(graph, tuple(map(tuple, groups)), tuple(range(len(graph))))

    def in_region(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """The nodes of the region's graph with the same values as these nodes.

        Raises :class:`BadFusion` if there is none for one of them.
        """
        found = []
        for index in nodes:
            origin = self.origins[index]
            if origin is None:
                raise BadFusion(
                    f"{self.graph[index]} is a part of a value, which is no value of the region's "
                    "graph; a kernel reads and writes values of that graph only; use a partition "
                    "of that graph"
                )
            found.append(origin)
        return tuple(found)

    def are_in_region(self, nodes: Iterable[int]) -> bool:
        """Whether the region's graph has the values of all these nodes."""
        return all(self.origins[index] is not None for index in nodes)

    @cached_property
    def owner(self) -> dict[int, int]:
        """The position in ``groups`` of the kernel of each operator."""
        return {index: at for at, group in enumerate(self.groups) for index in group}

    @property
    def store_known_values(self) -> bool:
        """Whether all values that kernels exchange are values of the region's graph."""
        owner = self.owner
        return self.are_in_region(
            index
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
        """Return the new graph and, for each of its nodes, the region node with the same value.

        The node is None if there is none.  The outputs correspond to those of ``self.graph``, in
        order.
        """
        outputs = tuple(self.position[index] for index in self.graph.outputs)
        compared = tuple(tuple(self.position[i] for i in group) for group in self.graph.compared)
        graph = Graph(tuple(self._nodes), outputs, self.graph.varying, compared)
        return graph, tuple(self._origins)
