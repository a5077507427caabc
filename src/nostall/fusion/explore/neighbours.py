"""Which operators hang together: one reads the other, or both read the same source."""

from __future__ import annotations

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, mask_of


def neighbours(graph: Graph) -> dict[int, Mask]:
    """Of every operator a mask of the operators that it shares data with."""
    found = dict.fromkeys(graph.operators, 0)
    for node in graph:
        readers = [user for user in graph.consumers[node.index] if user in found]
        together = mask_of(readers)
        if node.index in found:
            found[node.index] |= together
            together |= 1 << node.index
        for reader in readers:
            found[reader] |= together & ~(1 << reader)
    return found
