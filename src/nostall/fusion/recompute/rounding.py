"""Copies that may round otherwise than the original and so change the result of a comparison.

A value that is read from memory is the same number in all kernels.  A value that two kernels
compute may differ by rounding: the compiler contracts a product and an addition to one operation in
one of them, and narrow floats are rounded when they are stored.  If a maximum is computed from one
of two such values, no element of the other one may equal it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from nostall.fusion.graph.decisions import is_discontinuous, is_float
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPUTE, DTYPE_BYTES

_PRODUCTS = frozenset({"mul", "square"})
_SUMS = frozenset({"add", "sub"})
_CONTRACTED_THROUGH = frozenset({"neg", "copy", "cast"})
"""Operators between a product and a sum that do not keep a compiler from contracting them."""
_KEPT_EXACT = frozenset({"cast"})
"""Operators whose narrow results are rounded in registers, too."""


def may_change_decisions(graph: Graph, copied: Collection[int], results: Iterable[int]) -> bool:
    """Whether copies may make a discontinuous operator give another result.

    That is so if an operator in ``copied`` may round otherwise in its copy, and a discontinuous
    operator depends on it, in ``copied`` or by one of ``results``, the nodes whose values are those
    of copies.  It is also so if two outputs depend on that operator that a region behind this one
    compares: one may be computed from the copy and the other one from the original.
    """
    rounded = [index for index in copied if _may_round_otherwise(graph, index)]
    if not rounded:
        return False
    if graph.compared:
        behind = _reached(graph, rounded)
        if any(len(behind.intersection(group)) > 1 for group in graph.compared):
            return True
    allowed = {*copied, *_reached(graph, results)}
    return any(is_discontinuous(graph, i) for i in _reached(graph, rounded, allowed))


def _reached(
    graph: Graph, starts: Iterable[int], allowed: Collection[int] | None = None
) -> set[int]:
    """The nodes that depend on ``starts``, and these, by paths over ``allowed`` nodes."""
    found, pending = set[int](), list(starts)
    while pending:
        index = pending.pop()
        if index not in found and (allowed is None or index in allowed):
            found.add(index)
            pending.extend(graph.users[index])
    return found


def _may_round_otherwise(graph: Graph, index: int) -> bool:
    """Whether the value of an operator depends on the kernel that computes it."""
    node = graph[index]
    if any(_is_rounded_in_memory(graph[source]) for source in (index, *graph.sources[index])):
        return True
    # The code for a heavy operator depends on its readers.
    if node.kind == "heavy":
        return True
    other = {"mul": _SUMS, "square": _SUMS, "add": _PRODUCTS, "sub": _PRODUCTS}.get(node.op, ())
    edges = graph.users if node.op in _PRODUCTS else [each.inputs for each in graph]
    return any(neighbour.op in other for neighbour in _neighbours(graph, index, edges))


def _is_rounded_in_memory(node: Node) -> bool:
    """Whether the value is rounded when it is stored, but not in the kernel that computes it."""
    is_narrow = is_float(node) and DTYPE_BYTES[node.dtype] < 4
    return is_narrow and node.kind in COMPUTE and node.op not in _KEPT_EXACT


def _neighbours(graph: Graph, index: int, edges: Sequence[Sequence[int]]) -> Iterator[Node]:
    """The nodes at the other end of a node's edges, views and the like skipped."""
    pending = list(edges[index])
    while pending:
        node = graph[pending.pop()]
        if node.op in _CONTRACTED_THROUGH or node.kind == "layout":
            pending.extend(edges[node.index])
        else:
            yield node
