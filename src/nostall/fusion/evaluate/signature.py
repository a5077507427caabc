"""Signatures of patterns, so that the equal patterns of repeated layers are evaluated once."""

from __future__ import annotations

from collections.abc import Hashable

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, members

Signature = tuple[int, ...]


class Signatures:
    """Computes signatures of patterns of one graph.

    Two patterns have the same signature if, operator by operator in topological order, they have
    equal operations, read through equal views, share the same operands and write the same results.
    The signature does not contain whether other operators are between them (convexity).
    """

    def __init__(self, graph: Graph) -> None:
        numbers: dict[Hashable, int] = {}
        operand_numbers: list[int] = []
        self._own: dict[int, int] = {}
        self._reads: dict[int, tuple[int, ...]] = {}
        self._readers: dict[int, tuple[int, ...]] = {}
        for node in graph:
            tensor = (node.shape, node.dtype, node.strides)
            attributes = tuple((name, repr(value)) for name, value in node.attributes)
            inputs = tuple(operand_numbers[i] for i in node.inputs)
            operation = (node.op, *tensor, attributes, inputs)
            # A kernel repeats a view or constant, so its reader depends on the whole operation.
            # Of other operands, a reader depends only on the tensor.
            is_repeated = node.kind in ("layout", "constant")
            operand = operation if is_repeated else tensor
            operand_numbers.append(numbers.setdefault(operand, len(numbers)))
            if node.kind not in COMPUTE:
                continue
            self._own[node.index] = numbers.setdefault(operation, len(numbers))
            self._reads[node.index] = (*node.inputs, *map(graph.base, node.inputs))
            # The reader -1, which is in no pattern, stands for the caller of the graph.
            result = (-1,) if node.index in graph.results else ()
            self._readers[node.index] = (*graph.consumers[node.index], *result)

    def signature(self, mask: Mask) -> Signature:
        """The signature of a set of operators."""
        order = members(mask)
        inside = set(order)
        place: dict[int, int] = {}
        numbers = []
        for index in order:
            numbers.append(self._own[index])
            numbers += [place.setdefault(read, len(place)) for read in self._reads[index]]
            numbers.append(place.setdefault(index, len(place)))
            numbers.append(inside.issuperset(self._readers[index]))
        return tuple(numbers)
