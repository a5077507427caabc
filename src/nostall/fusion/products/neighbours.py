"""Operators beside a product's kernel that Inductor would compute together with parts of it.

They are measured with the kernel: what computes the left operand may be the last part of a kernel
that reads the same tensors anyway, such as that of a norm.
"""

from __future__ import annotations

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.products.find import FoundProduct

MAX_IN_FRONT = 64
"""Operators in front of a kernel that are measured with it, at most: as many as one kernel has."""


def operators_in_front(graph: Graph, found: FoundProduct) -> frozenset[int]:
    """The operators before those that compute the left operand, up to the next opaque calls.

    ``graph``: the captured graph. Empty if the kernel reads its left operand.
    """
    kernel = found.kernel
    waiting = sorted(i for i in found.captured(kernel.prologue) if i >= 0)
    members: set[int] = set()
    while waiting and len(members) < MAX_IN_FRONT:
        for source in graph.sources[waiting.pop()]:
            is_next = graph[source].kind in COMPUTE and source not in found.operators
            if is_next and source not in members:
                members.add(source)
                waiting.append(source)
    return frozenset(members)
