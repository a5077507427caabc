"""Contracted graph of selected kernels, to check that one more kernel keeps it acyclic."""

from __future__ import annotations

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, members


class ContractedGraph:
    """A graph in which each selected kernel is one node; other operators stay single nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owner: dict[int, Mask] = {}
        """The kernel of each operator that is in a kernel of several operators."""
        self.grouped: Mask = 0
        """All operators in ``owner``."""
        self.reach = list(range(len(graph)))
        """For each node: the last operator of the kernels that start at or before it and end after
        it; the node itself if there are none."""

    def copy(self) -> ContractedGraph:
        """A contracted graph with the same kernels."""
        copy = ContractedGraph(self.graph)
        copy.owner, copy.grouped, copy.reach = dict(self.owner), self.grouped, self.reach.copy()
        return copy

    def add(self, mask: Mask) -> None:
        """Select a kernel. It must be disjoint from the others, and :meth:`admits` must be true."""
        if mask & (mask - 1):
            inside = members(mask)
            self.owner.update(dict.fromkeys(inside, mask))
            self.grouped |= mask
            for index in range(inside[0], inside[-1]):
                self.reach[index] = max(self.reach[index], inside[-1])

    def remove(self, mask: Mask) -> None:
        """Deselect a kernel; its operators become single nodes again."""
        if mask & (mask - 1):
            for index in members(mask):
                del self.owner[index]
            self.grouped &= ~mask
            # `reach` is not reduced: a value that is too large costs time, not correctness.

    def admits(self, mask: Mask) -> bool:
        """Whether no path through other kernels leaves a convex set and returns to it."""
        if not mask & (mask - 1):
            return True  # a single node already
        graph = self.graph
        above = below = 0
        for index in members(mask):
            above |= graph.ancestors[index]
            below |= graph.descendants[index]
        # Such a path enters a kernel below the set and leaves a kernel above the set.
        if not below & ~mask & self.grouped or not above & ~mask & self.grouped:
            return True
        # Edges lead to later nodes, and no kernel leads from after `last` to a node before it. So
        # the search can ignore all nodes after `last`.
        last = mask.bit_length() - 1
        while self.reach[last] > last:
            last = self.reach[last]
        pending = [u for i in members(mask) for u in graph.consumers[i] if not mask >> u & 1]
        seen = mask
        while pending:
            index = pending.pop()
            if seen >> index & 1 or index > last:
                continue
            kernel = self.owner.get(index, 1 << index)
            seen |= kernel
            for member in members(kernel):
                for user in graph.consumers[member]:
                    if mask >> user & 1:
                        return False
                    pending.append(user)
        return True
