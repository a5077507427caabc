"""Kernel packing: independent kernels become one launch (remote fusion in arXiv:2009.10924).

Kernels of equal depth in the contracted graph do not depend on each other, and each edge leads to a
greater depth. So packing kernels of equal depth keeps the partition acyclic.
"""

from __future__ import annotations

from collections import defaultdict

from nostall.fusion.errors import BadFusion
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.graph.partition import Mask, Partition


def pack_kernels(delta: DeltaEvaluator, partition: Partition) -> Partition:
    """The partition with kernels of equal depth packed first-fit, if the evaluator sees a gain."""
    groups = []
    for kernels in _kernels_by_depth(delta, partition).values():
        packs: list[Mask] = []
        for mask in kernels:
            for at, pack in enumerate(packs):
                if _pays(delta, pack, mask):
                    packs[at] = pack | mask
                    break
            else:
                packs.append(mask)
        groups += packs
    return Partition.from_groups(groups)


def _pays(delta: DeltaEvaluator, first: Mask, second: Mask) -> bool:
    packed = delta.gain(first | second)
    if packed is None:
        return False
    separate = (delta.gain(first) or 0.0) + (delta.gain(second) or 0.0)
    return packed > separate and delta.can_fuse(first | second)


def _kernels_by_depth(delta: DeltaEvaluator, partition: Partition) -> dict[int, list[Mask]]:
    """Kernels by depth: the length of the longest chain of kernels and opaque nodes to them."""
    graph = delta.graph
    opaque = [(node.index,) for node in graph if node.kind == "opaque"]
    steps = [*partition.kernels, *opaque]
    order = graph.execution_order(steps)
    if order is None:
        raise BadFusion(
            "kernels of the partition depend on each other in a cycle; call check() on it first"
        )
    depth: dict[int, int] = {}
    kernels: defaultdict[int, list[Mask]] = defaultdict(list)
    for at in order:
        inside = set(steps[at])
        sources = {source for index in steps[at] for source in graph.sources[index]} - inside
        level = 1 + max((depth.get(source, 0) for source in sources), default=0)
        depth.update(dict.fromkeys(steps[at], level))
        if at < len(partition):
            kernels[level].append(partition.groups[at])
    return kernels
