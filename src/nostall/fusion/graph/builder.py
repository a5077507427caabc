"""Builder of operator graphs that infers shapes, dtypes and strides from the operands."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from nostall.fusion.errors import BadGraph
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPARISONS, OPERATIONS, Attribute
from nostall.fusion.graph.shapes import Shape, contiguous_strides, result_shape


class Builder:
    """Builds a graph node by node; each method returns the index of the node that it adds.

    build = Builder()
    x = build.input((8, 128))
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(build("div", x, total))
    """

    def __init__(self, varying: int | None = None) -> None:
        """``varying`` is the placeholder prime of the dynamic size, None if all are static."""
        self.nodes: list[Node] = []
        self.varying = varying

    def input(self, shape: Shape, dtype: str = "float32", strides: Shape | None = None) -> int:
        """Add a tensor that kernels read; row-major if ``strides`` is None."""
        return self._add("input", (), shape, dtype, {}, strides)

    def constant(self, value: int | float | bool, dtype: str = "float32", shape: Shape = ()) -> int:
        """Add one value for all elements, as the dtype holds it.

        An integer out of the dtype's range wraps around, and 16-bit floats round the value.
        """
        return self._add("constant", (), shape, dtype, {"value": stored_value(value, dtype)})

    def opaque(
        self, target: str, *inputs: int, shape: Shape, dtype: str, strides: Shape | None = None
    ) -> int:
        """Add a value that no kernel computes; ``target`` names the operation."""
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
        """Add an operation. Only views, expand, slice, iota and random need ``shape``.

        Without ``dtype``, comparisons give ``bool``, ``iota`` gives ``int64``, and other operations
        give the dtype of the first operand that is not bool, or ``bool`` if all are. The condition
        of ``where`` does not count. Raises :class:`BadGraph` if operands or attributes do not fit.
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
        inferred = result_shape(op, [n.shape for n in operands], attributes, shape or ())
        if inferred is None:
            sizes = ", ".join(str(node.shape) for node in operands)
            raise BadGraph(f"{op} cannot take operands of shape {sizes} with {attributes}")
        return self._add(op, inputs, inferred, dtype or _dtype(op, operands), attributes, strides)

    def copy(self, index: int, inputs: tuple[int, ...]) -> int:
        """Add a node like the one at ``index``, with other operands of the same shapes."""
        node = self.nodes[index]
        attributes = dict(node.attributes)
        return self._add(node.op, inputs, node.shape, node.dtype, attributes, node.strides)

    def graph(self, *outputs: int) -> Graph:
        """The graph of all added nodes; raises :class:`BadGraph` if it is invalid."""
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
        strides = contiguous_strides(shape) if strides is None else strides
        pairs = tuple(sorted(attributes.items()))
        self.nodes.append(Node(index, op, inputs, shape, dtype, strides, pairs))
        return index


def stored_value(value: int | float | bool, dtype: str) -> int | float | bool:
    """The value as PyTorch stores it in a dtype: integers wrap around at the dtype's width."""
    if dtype in _ROUND and math.isfinite(value) and not isinstance(value, bool):
        rounded = _ROUND[dtype](float(value))
        return value if rounded == value else rounded
    if dtype not in _BITS or isinstance(value, bool) or not math.isfinite(value):
        return value
    bits, is_signed = _BITS[dtype], dtype != "uint8"
    minimum = -(1 << bits - 1) if is_signed else 0
    return (int(value) - minimum) % (1 << bits) + minimum


def _round_float16(value: float) -> float:
    try:
        return float(struct.unpack("e", struct.pack("e", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _round_bfloat16(value: float) -> float:
    """The value rounded to fp32 and then, to nearest even, to the upper 16 of its 32 bits."""
    try:
        (bits,) = struct.unpack("I", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("f", struct.pack("I", bits))[0])


_ROUND: dict[str, Callable[[float], float]] = {
    "float16": _round_float16,
    "bfloat16": _round_bfloat16,
}
_BITS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8}


def _dtype(op: str, operands: Sequence[Node]) -> str:
    if op in COMPARISONS:
        return "bool"
    if op == "iota":
        return "int64"
    values = operands[1:] if op == "where" else operands
    return next((node.dtype for node in values if node.dtype != "bool"), "bool")
