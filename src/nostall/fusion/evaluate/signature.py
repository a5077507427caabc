"""What was asked of a pattern once is known of its equals: layers of a model repeat."""

from __future__ import annotations

from collections.abc import Hashable

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, members

Signature = tuple[int, ...]


class Signatures:
    """Patterns of one graph have the same signature where their operators, in order, are equal, the
    views through which they read too, and where they share and write the same.

    Whether other operators lie between them (convexity) is not in it.
    """

    def __init__(self, graph: Graph) -> None:
        numbers: dict[Hashable, int] = {}
        seen: list[int] = []
        self._own: dict[int, int] = {}
        self._reads: dict[int, tuple[int, ...]] = {}
        self._readers: dict[int, tuple[int, ...]] = {}
        for node in graph:
            what = (node.shape, node.dtype, node.strides)
            attributes = tuple((name, repr(value)) for name, value in node.attributes)
            whole = (node.op, *what, attributes, tuple(seen[i] for i in node.inputs))
            # To its readers a node is all that it is where they carry it, else a tensor.
            carried = node.kind in ("layout", "constant")
            seen.append(numbers.setdefault(whole if carried else what, len(numbers)))
            if node.kind not in COMPUTE:
                continue
            self._own[node.index] = numbers.setdefault(whole, len(numbers))
            self._reads[node.index] = (*node.inputs, *map(graph.base, node.inputs))
            # A result is read by something that is in no pattern.
            result = (-1,) if node.index in graph.results else ()
            self._readers[node.index] = (*graph.consumers[node.index], *result)

    def of(self, mask: Mask) -> Signature:
        """The signature of a set of operators."""
        order = members(mask)
        inside = set(order)
        place: dict[int, int] = {}
        found = []
        for index in order:
            found.append(self._own[index])
            found += [place.setdefault(read, len(place)) for read in self._reads[index]]
            found.append(place.setdefault(index, len(place)))
            found.append(inside.issuperset(self._readers[index]))
        return tuple(found)
