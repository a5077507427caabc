"""Copies of products and of the operators around them, as the graph of one kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node as FxNode

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.operations import DTYPE_BYTES
from nostall.fusion.products.product_graph import ProductGraph
from nostall.fusion.products.rules import INSIDE_CALL, ProductCall

NO_ORIGIN = -1
"""Stands for nodes of a kernel's graph that are no values of the captured graph."""


class Extraction:
    """Copies products and elementwise operators to a graph of their own."""

    def __init__(
        self, captured: CapturedGraph, members: Collection[int], input_views: frozenset[int]
    ) -> None:
        self._captured, self._members, self._input_views = captured, members, input_views
        self._build = Builder()
        self._origins: list[int] = []
        # Nodes of the new graph by captured node.
        self._copies: dict[int, int] = {}

    def extract(
        self, products: Mapping[int, ProductCall], outputs: Sequence[int]
    ) -> tuple[ProductGraph, tuple[int, ...]]:
        """The kernel's graph and the captured node of each of its nodes.

        ``products``: the calls by captured node. ``outputs``: captured nodes.
        Raises :class:`BadFusion` if the kernel would read a value that the FX graph does not have.
        """
        # Left operands of a pair are equal, but may be different views of one value.
        left = self._left_operand([*products.values()])
        prologue = self._forget_computed()
        for index, call in products.items():
            self._copies[index] = self._add_product(index, call, left)
        for index in sorted(set(self._members) - prologue):
            self._copy(index)
        graph = self._build.graph(*(self._copies[index] for index in outputs))
        return ProductGraph(graph), tuple(self._origins)

    def _add_product(self, index: int, call: ProductCall, left: int) -> int:
        """Add a product with what is added to it, rounded to its dtype."""
        build, node = self._build, self._captured.graph[index]
        value = build("dot", left, self._operand(call.right), dtype="float32")
        self._origins.append(NO_ORIGIN)
        if call.added is not None:
            value = build("add", value, self._operand(call.added), dtype="float32")
            self._origins.append(NO_ORIGIN)
        # The value that other operators read is a node of its own: sums are no results of kernels.
        value = build(
            "cast" if node.dtype != "float32" else "copy",
            value,
            dtype=node.dtype,
            strides=node.strides,
        )
        self._origins.append(index)
        return value

    def _left_operand(self, products: Sequence[ProductCall]) -> int:
        """The left operand: an input, or the last operator of the prologue."""
        operand = products[0].left
        index = self._captured.values[operand]
        if not isinstance(index, int) or self._captured.graph.base(index) not in self._members:
            return self._operand(operand)
        # What is another operand, too, is an input, even if it is an operator of the prologue.
        for call in products:
            for other in call.operands[1:]:
                self._operand(other)
        # A node of its own has the axes of the product, and the dtype that its elements round to.
        value = self._build("copy", self._copy(index))
        self._origins.append(NO_ORIGIN)
        return value

    def _forget_computed(self) -> set[int]:
        """Forget what is computed so far, and return it: operators of the epilogue get copies.

        The loops of a prologue are not those of the epilogue.
        """
        nodes, kept = self._build.nodes, dict[int, int]()
        for index, position in self._copies.items():
            below = position
            while nodes[below].kind == "layout":
                below = nodes[below].inputs[0]
            if nodes[below].kind in ("input", "constant"):
                kept[index] = position
        computed = set(self._copies) - set(kept)
        self._copies = kept
        return computed

    def _operand(self, operand: FxNode) -> int:
        """The input for an operand of a product, with the strides of the FX graph."""
        index = self._captured.values[operand]
        if not isinstance(index, int):
            raise BadFusion(INSIDE_CALL)
        if index not in self._copies:
            value = self._captured.origins[index].meta["val"]
            dtype = str(value.dtype).removeprefix("torch.")
            self._copies[index] = self._add_input(
                index, tuple(value.shape), dtype, tuple(value.stride())
            )
        return self._copies[index]

    def _copy(self, index: int) -> int:
        """Copy a captured node with everything below it that the kernel computes or views."""
        if index in self._copies:
            return self._copies[index]
        node = self._captured.graph[index]
        is_view = node.kind in ("layout", "constant") and index not in self._input_views
        if not is_view and index not in self._members:
            self._copies[index] = self._outside(index)
            return self._copies[index]
        inputs = tuple(self._copy(operand) for operand in node.inputs)
        position = len(self._build.nodes)
        self._build.nodes.append(replace(node, index=position, inputs=inputs))
        self._origins.append(index)
        self._copies[index] = position
        return position

    def _outside(self, index: int) -> int:
        """The input for a value that another kernel or PyTorch computes."""
        node = self._captured.graph[index]
        if index not in self._captured.origins or node.dtype not in DTYPE_BYTES:
            raise BadFusion(INSIDE_CALL)
        return self._add_input(index, node.shape, node.dtype, node.strides)

    def _add_input(
        self, index: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]
    ) -> int:
        position = self._build.input(shape, dtype, strides)
        self._origins.append(index)
        return position
