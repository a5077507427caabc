"""The graph of one kernel: one or two products of one left operand, and operators around them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nostall.fusion.codegen.tiling.product_config import ProductShape
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import DTYPE_BYTES, ELEMENTWISE

DESCRIPTOR_ALIGNMENT = 16
"""A tensor descriptor needs strides, except the last, in multiples of so many bytes."""


@dataclass(frozen=True)
class ProductGraph:
    """The operators of one kernel.  Products of 16-bit floats are ``dot`` nodes of dtype float32,
    which a ``cast`` rounds, as cuBLAS rounds its sums once."""

    graph: Graph

    @property
    def dots(self) -> tuple[int, ...]:
        """The product nodes. Right operands are inputs of the graph, and so is the left one if the
        kernel does not compute it."""
        return tuple(node.index for node in self.graph if node.kind == "dot")

    def rounded(self, dot: int) -> int:
        """The node of a product in its own dtype, which other operators read."""
        (reader,) = self.graph.users[dot]
        if self.graph[reader].op == "add":
            (reader,) = self.graph.users[reader]
        return reader

    @property
    def epilogue(self) -> tuple[int, ...]:
        """The operators that read the products, and those that these need, in order: elementwise
        ones, and reductions over all rows or all columns."""
        return self._computed_from(self.graph.outputs)

    @property
    def reductions(self) -> tuple[int, ...]:
        return tuple(i for i in self.epilogue if self.graph[i].kind == "reduce")

    @property
    def finishing(self) -> tuple[int, ...]:
        """The operators behind reductions, such as the division of a mean."""
        behind = set(self.reductions)
        for index in self.epilogue:
            if behind & set(self.graph.sources[index]):
                behind.add(index)
        return tuple(sorted(behind - {*self.reductions}))

    @property
    def prologue(self) -> tuple[int, ...]:
        """The elementwise operators that compute the left operand, in graph order.

        The last one has the shape of the operand, (rows, depth).
        """
        return self._computed_from([self.left.index])

    def _computed_from(self, roots: Iterable[int]) -> tuple[int, ...]:
        """The operators that some nodes need, without those of a prologue."""
        waiting, found = list(roots), set[int]()
        while waiting:
            node = self.graph[waiting.pop()]
            if node.index in found or node.kind not in (*ELEMENTWISE, "reduce", "layout"):
                continue
            found.add(node.index)
            waiting += node.inputs
        return tuple(sorted(i for i in found if self.graph[i].kind != "layout"))

    @property
    def operators(self) -> tuple[int, ...]:
        """All operators that the kernel computes."""
        return self.graph.operators

    @property
    def left(self) -> Node:
        """The left operand of all products, of shape (rows, depth)."""
        return self.graph[self.graph[self.dots[0]].inputs[0]]

    @property
    def rights(self) -> tuple[Node, ...]:
        """The right operands, each of shape (depth, columns)."""
        return tuple(self.graph[self.graph[index].inputs[1]] for index in self.dots)

    @property
    def shape(self) -> ProductShape:
        """Sizes of the products."""
        (rows, depth), columns = self.left.shape, self.rights[0].shape[1]
        prologue = self.prologue
        operands = self.rights if prologue else (self.left, *self.rights)
        return ProductShape(
            rows,
            columns,
            depth,
            self.left.dtype,
            len(self.dots),
            all(contiguous_axis(node) is not None for node in operands),
            self._bytes_read(prologue, rows * depth),
        )

    def _bytes_read(self, operators: Iterable[int], elements: int) -> int:
        """Bytes of one element of all tensors in memory that have so many elements."""
        graph = self.graph
        reads = {i for index in operators for i in graph[index].inputs}
        return sum(
            DTYPE_BYTES[graph[i].dtype]
            for i in reads
            if graph[graph.base(i)].kind == "input" and graph[i].elements == elements
        )


def contiguous_axis(node: Node) -> int | None:
    """The axis along which a tensor descriptor can copy a matrix; None if there is none.

    Elements lie next to each other along that axis, and the other stride is a multiple of
    :data:`DESCRIPTOR_ALIGNMENT` bytes.
    """
    size = DTYPE_BYTES[node.dtype]
    for axis in (1, 0):
        other = node.strides[1 - axis]
        if node.strides[axis] == 1 and other > 0 and other * size % DESCRIPTOR_ALIGNMENT == 0:
            return axis
    return None
