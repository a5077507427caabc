"""The baseline: what compilers of today do, without a time model.

As PyTorch Inductor's scheduler (``fuse_nodes``): up to ten rounds; in each, pairs of kernels that
share data are ranked by the bytes that one kernel would save, and fused in this order wherever that
is legal.  What is legal is what nostall can generate, which is more than Inductor fuses: the
baseline lacks the explorer's eyes, not its hands.
"""

from __future__ import annotations

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore.joining import joined
from nostall.fusion.graph.partition import Mask, Plan, reads, writes

ROUNDS = 10


def greedy(delta: Delta) -> Plan:
    """Fuse pairs by bytes saved until nothing changes."""
    graph = delta.graph

    def moved(mask: Mask) -> int:
        return sum(graph[index].bytes for index in (*reads(graph, mask), *writes(graph, mask)))

    def saved(one: Mask, other: Mask) -> float:
        return float(moved(one) + moved(other) - moved(one | other))

    return joined(delta, Plan.unfused(graph), saved, ROUNDS)
