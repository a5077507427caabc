"""Whether one more kernel keeps the kernels chosen so far free of circles."""

from __future__ import annotations

from nostall.fusion.graph import Graph
from nostall.fusion.plan import Mask, members


class Contraction:
    """Chosen kernels of a growing plan; operators outside of them run by themselves."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owner: dict[int, Mask] = {}
        self.grouped: Mask = 0
        self.last = -1

    def copy(self) -> Contraction:
        """Another one with the same kernels."""
        made = Contraction(self.graph)
        made.owner, made.grouped, made.last = dict(self.owner), self.grouped, self.last
        return made

    def add(self, mask: Mask) -> None:
        """Choose a kernel; it must be disjoint from the others and :meth:`admits` it."""
        if mask & (mask - 1):
            self.owner.update(dict.fromkeys(members(mask), mask))
            self.grouped |= mask
            self.last = max(self.last, mask.bit_length() - 1)

    def remove(self, mask: Mask) -> None:
        """Give up a kernel; its operators run by themselves again."""
        if mask & (mask - 1):
            for index in members(mask):
                del self.owner[index]
            self.grouped &= ~mask
            # `last` stays: too late a last operator costs time, nothing else.

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
        last = max(self.last, mask.bit_length() - 1)
        waiting = [u for i in members(mask) for u in graph.consumers[i] if not mask >> u & 1]
        seen = mask
        while waiting:
            index = waiting.pop()
            # Behind the last operator of all kernels every way only leads further down.
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
