"""Greedy partition by saved bytes: the baseline, which works like PyTorch Inductor's scheduler.

Inductor's ``fuse_nodes`` runs up to ten rounds. In each round it sorts the pairs of kernels that
share data by the bytes that fusing them saves, and fuses them in that order if that is legal. There
is no time model. The baseline differs in one point: legal is what nostall can generate, which is
more than what Inductor fuses.
"""

from __future__ import annotations

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.joining import join_kernels
from nostall.fusion.graph.partition import Mask, Partition, kernel_inputs, kernel_outputs

MAX_ROUNDS = 10


def greedy_partition(delta: DeltaEvaluator) -> Partition:
    """Fuse pairs of kernels by saved bytes until nothing changes."""
    graph = delta.graph

    def moved_bytes(mask: Mask) -> int:
        nodes = (*kernel_inputs(graph, mask), *kernel_outputs(graph, mask))
        return sum(graph[index].bytes for index in nodes)

    def saved_bytes(first: Mask, second: Mask) -> float:
        return float(moved_bytes(first) + moved_bytes(second) - moved_bytes(first | second))

    return join_kernels(delta, Partition.unfused(graph), saved_bytes, MAX_ROUNDS)
