"""Whether one more kernel keeps the kernels chosen so far free of circles."""

from __future__ import annotations

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, members


class Contraction:
    """Chosen kernels of a growing plan; operators outside of them run by themselves."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owner: dict[int, Mask] = {}
        self.grouped: Mask = 0
        # Of every node the last operator of the kernels that begin before it and end behind it.
        self.reach = list(range(len(graph)))

    def copy(self) -> Contraction:
        """Another one with the same kernels."""
        made = Contraction(self.graph)
        made.owner, made.grouped, made.reach = dict(self.owner), self.grouped, self.reach.copy()
        return made

    def add(self, mask: Mask) -> None:
        """Choose a kernel; it must be disjoint from the others and :meth:`admits` it."""
        if mask & (mask - 1):
            inside = members(mask)
            self.owner.update(dict.fromkeys(inside, mask))
            self.grouped |= mask
            for index in range(inside[0], inside[-1]):
                self.reach[index] = max(self.reach[index], inside[-1])

    def remove(self, mask: Mask) -> None:
        """Give up a kernel; its operators run by themselves again."""
        if mask & (mask - 1):
            for index in members(mask):
                del self.owner[index]
            self.grouped &= ~mask
            # `reach` stays: too far costs time, nothing else.

    def admits(self, mask: Mask) -> bool:
        """Whether a convex set stays without a way back to itself through other kernels."""
        if not mask & (mask - 1):
            return True  # it runs by itself already
        graph = self.graph
        above = below = 0
        for index in members(mask):
            above |= graph.ancestors[index]
            below |= graph.descendants[index]
        # The way back enters a kernel below the set and leaves one above it.
        if not below & ~mask & self.grouped or not above & ~mask & self.grouped:
            return True
        # Behind `last` no kernel leads back before it, and every way only leads further down.
        last = mask.bit_length() - 1
        while self.reach[last] > last:
            last = self.reach[last]
        waiting = [u for i in members(mask) for u in graph.consumers[i] if not mask >> u & 1]
        seen = mask
        while waiting:
            index = waiting.pop()
            if seen >> index & 1 or index > last:
                continue
            together = self.owner.get(index, 1 << index)
            seen |= together
            for member in members(together):
                for user in graph.consumers[member]:
                    if mask >> user & 1:
                        return False
                    waiting.append(user)
        return True
