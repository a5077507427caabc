"""Writing an operator graph by hand: shapes, dtypes and strides follow from the operands."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nostall.fusion.errors import BadGraph
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPARISONS, OPERATIONS, Attribute
from nostall.fusion.graph.shapes import Shape, contiguous, result_shape


class Builder:
    """Collects nodes; every method returns the index of the node that it adds.

    build = Builder()
    x = build.input((8, 128))
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(build("div", x, total))
    """

    def __init__(self, varying: int | None = None) -> None:
        self.nodes: list[Node] = []
        self.varying = varying

    def input(self, shape: Shape, dtype: str = "float32", strides: Shape | None = None) -> int:
        """A tensor that the kernel is given; row-major where no strides are said."""
        return self._add("input", (), shape, dtype, {}, strides)

    def constant(self, value: int | float | bool, dtype: str = "float32", shape: Shape = ()) -> int:
        """The same value everywhere; beyond an integer dtype it is wrapped, as in PyTorch."""
        return self._add("constant", (), shape, dtype, {"value": _held(value, dtype)})

    def opaque(
        self, target: str, *inputs: int, shape: Shape, dtype: str, strides: Shape | None = None
    ) -> int:
        """A border: something that is computed elsewhere."""
        return self._add("opaque", inputs, shape, dtype, {"target": target}, strides)

    def __call__(
        self,
        op: str,
        *inputs: int,
        shape: Shape | None = None,
        dtype: str | None = None,
        strides: Shape | None = None,
        **attributes: Attribute,
    ) -> int:
        """Add an operation.  ``shape`` is needed for views, expand, slice, iota and random only.

        The dtype is that of the first operand that is not bool (``bool`` where there is none, and
        for comparisons); ``where`` takes that of its second.  Raises :class:`BadGraph`.
        """
        if op not in OPERATIONS:
            raise BadGraph(
                f"unknown operation {op!r}; known are {', '.join(OPERATIONS)}; use one of them, "
                "or opaque()"
            )
        operands = [self.nodes[index] for index in inputs]
        row = OPERATIONS[op]
        if row.arity not in (None, len(inputs)):
            raise BadGraph(f"{op} got {len(inputs)} operands; it takes {row.arity}")
        fitting = result_shape(op, [n.shape for n in operands], attributes, shape or ())
        if fitting is None:
            sizes = ", ".join(str(node.shape) for node in operands)
            raise BadGraph(f"{op} cannot take operands of shape {sizes} with {attributes}")
        return self._add(op, inputs, fitting, dtype or _dtype(op, operands), attributes, strides)

    def graph(self, *outputs: int) -> Graph:
        """The graph of all that was added; raises :class:`BadGraph`."""
        return Graph(tuple(self.nodes), outputs, self.varying)

    def _add(
        self,
        op: str,
        inputs: tuple[int, ...],
        shape: Shape,
        dtype: str,
        attributes: dict[str, Attribute],
        strides: Shape | None = None,
    ) -> int:
        index = len(self.nodes)
        laid = contiguous(shape) if strides is None else strides
        given = tuple(sorted(attributes.items()))
        self.nodes.append(Node(index, op, inputs, shape, dtype, laid, given))
        return index


def _held(value: int | float | bool, dtype: str) -> int | float | bool:
    if dtype not in _BITS or isinstance(value, bool) or not math.isfinite(value):
        return value
    bits, is_signed = _BITS[dtype], dtype != "uint8"
    least = -(1 << bits - 1) if is_signed else 0
    return (int(value) - least) % (1 << bits) + least


_BITS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8}


def _dtype(op: str, operands: Sequence[Node]) -> str:
    if op in COMPARISONS:
        return "bool"
    if op == "iota":
        return "int64"
    values = operands[1:] if op == "where" else operands
    return next((node.dtype for node in values if node.dtype != "bool"), "bool")
