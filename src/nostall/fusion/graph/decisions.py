"""Operators whose results jump, and the values that they compare with each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPARISONS, COMPUTE

_DISCONTINUOUS = COMPARISONS | frozenset(
    [
        "floor",
        "ceil",
        "round",
        "trunc",
        "sign",
        "remainder",
        "fmod",
        "copysign",
        "atan2",
        "checked_index",
    ]
)


def is_float(node: Node) -> bool:
    """Whether a value is a floating-point number."""
    return node.dtype.startswith(("float", "bfloat"))


def is_discontinuous(graph: Graph, index: int) -> bool:
    """Whether a rounding error of an operand may change the result of an operator by a lot."""
    node = graph[index]
    if node.op == "cast":
        return is_float(graph[node.inputs[0]]) and not is_float(node)
    return node.op in _DISCONTINUOUS


def compared_outputs(
    graph: Graph, regions: Sequence[Collection[int]], outputs: Sequence[Collection[int]]
) -> list[tuple[tuple[int, ...], ...]]:
    """For each region: groups of its outputs that a discontinuous operator behind it compares.

    ``regions`` are the operators of each region in order, ``outputs`` their outputs.  A group has
    two outputs or more.  The operator depends on them by paths without opaque nodes: beside a
    matrix product a rounding error is one among many.
    """
    region_of = {index: at for at, each in enumerate(regions) for index in each}
    masks = [sum(1 << index for index in each) for each in outputs]
    groups: list[set[int]] = [set() for _ in regions]
    # The operators that each node depends on by such paths, and the node itself if it is one.
    above = [0] * len(graph)
    for node in graph:
        if node.kind in COMPUTE or node.kind == "layout":
            for index in node.inputs:
                above[node.index] |= above[index]
        if node.kind not in COMPUTE:
            continue
        if is_discontinuous(graph, node.index):
            for at in range(region_of.get(node.index, 0)):
                found = above[node.index] & masks[at]
                if found & (found - 1):
                    groups[at].add(found)
        above[node.index] |= 1 << node.index
    return [
        tuple(tuple(i for i in outputs[at] if found >> i & 1) for found in sorted(each))
        for at, each in enumerate(groups)
    ]
