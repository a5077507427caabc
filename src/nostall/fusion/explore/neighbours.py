"""Operators that share data: one reads the other, or both read the same source."""

from __future__ import annotations

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, to_mask


def neighbours(graph: Graph) -> dict[int, Mask]:
    """For each operator: a mask of the operators that it shares data with."""
    masks = dict.fromkeys(graph.operators, 0)
    for node in graph:
        readers = [user for user in graph.consumers[node.index] if user in masks]
        sharing = to_mask(readers)
        if node.index in masks:
            masks[node.index] |= sharing
            sharing |= 1 << node.index
        for reader in readers:
            masks[reader] |= sharing & ~(1 << reader)
    return masks
