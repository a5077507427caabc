"""The ATen call that a lowering rule works on: its arguments, and methods that add graph nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.graph.builder import Builder, stored_value
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.operations import Attribute
from nostall.fusion.graph.shapes import Shape

ROUNDED_DTYPES = frozenset({"float16", "bfloat16"})
"""Dtypes that memory holds with fewer bits than kernels compute."""
MAX_ROUNDED_CHAIN = 8
"""Operators above a value up to which :meth:`Call.rounded` looks for values to round."""
_EXACT_OPERATORS = frozenset(
    {"copy", "neg", "abs", "relu", "sign", "floor", "ceil", "round", "trunc"}
    | {"maximum", "minimum", "where", "amax", "amin"}
)
"""Operators that give one of their operands, or another number that its dtype can represent."""

Value = int | tuple[int, ...]
"""The node of a tensor in the operator graph; a tuple of nodes for a tuple of tensors."""


Layout = Callable[[torch.Tensor], tuple[Shape, Shape]]
"""Function that returns the shape and strides of a fake tensor as ints."""


class Unsupported(Exception):
    """No kernel can compute an ATen call. Reports count equal texts, so the text has no sizes."""


class Call:
    """An ATen call that is being lowered: its arguments, its result, and the graph builder."""

    def __init__(
        self, node: Node, build: Builder, values: Mapping[Node, Value], layout: Layout
    ) -> None:
        self.node = node
        self.build = build
        self.values = values
        self.layout = layout
        self.result: torch.Tensor = node.meta["val"]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at a position or with a name.

        Raises :class:`Unsupported` if it is, or contains, a number known at run time only.
        """
        args = self.node.args
        value = args[place] if place < len(args) else self.node.kwargs.get(name, default)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if _is_number(item):
                raise Unsupported("a number that is known at run time only")
        return value

    def tensor(self, place: int) -> int:
        """The node of the tensor operand at a position."""
        operand = self.node.args[place]
        if _is_number(operand):
            raise Unsupported("a number that is known at run time only")
        value = self.values.get(operand) if isinstance(operand, Node) else None
        if not isinstance(value, int):
            raise Unsupported("an operand is no tensor")
        return value

    def operand(self, place: int) -> int:
        """The node of the operand at a position; a Python number becomes a constant."""
        value = self.node.args[place]
        if isinstance(value, (bool, int, float)):
            return self.number(value)
        return self.tensor(place)

    def number(self, value: bool | int | float, dtype: str | None = None) -> int:
        """Add a constant. Without ``dtype``, PyTorch's promotion of the call's tensors decides."""
        return self.build.constant(value, dtype or compute_dtype(self._promoted_dtype(value)))

    def rounded_operand(self, place: int) -> int:
        """The node of the operand at a position; a Python number has the dtype of the tensors.

        Narrow floats round the number; :meth:`operand` leaves it in fp32. A number that needs no
        rounding is the same constant in both.
        """
        value = self.node.args[place]
        if not isinstance(value, (bool, int, float)):
            return self.tensor(place)
        rounded = stored_value(value, dtype_name(self._promoted_dtype(value)))
        return self.number(value if rounded == value else rounded)

    def _promoted_dtype(self, value: bool | int | float) -> torch.dtype:
        """The dtype of a number beside the call's tensors: it does not widen them."""
        tensors = [arg.meta["val"] for arg in self.node.all_input_nodes]
        tensor_dtype = next((t.dtype for t in tensors if t.dim() > 0), None)
        tensor_dtype = tensor_dtype or next((t.dtype for t in tensors), torch.float32)
        return torch.result_type(torch.empty(1, dtype=tensor_dtype), value)

    def rounded(self, index: int, depth: int = MAX_ROUNDED_CHAIN) -> int:
        """The value as its dtype holds it; the same node if the kernel computes just that.

        Kernels compute narrow floats in fp32. An operator whose result jumps (a comparison) has to
        see the rounded value, because memory may hold that value elsewhere. A cast to fp32 and
        operators such as ``abs`` have the rounded value if their operands have it.
        """
        node = self.build.nodes[index]
        is_exact = node.kind == "layout" or node.op in _EXACT_OPERATORS
        if node.kind in ("input", "opaque", "constant") or "float" not in node.dtype:
            return index
        if depth and (is_exact or (node.op == "cast" and node.dtype not in ROUNDED_DTYPES)):
            operands = tuple(self.rounded(i, depth - 1) for i in node.inputs)
            return index if operands == node.inputs else self.build.copy(index, operands)
        if node.op == "cast" or node.dtype not in ROUNDED_DTYPES:
            return index
        return self.build("cast", index, dtype=node.dtype)

    def rounded_to(self, index: int, dtype: str) -> int:
        """The value rounded to ``dtype`` if that is a narrow float and not the value's dtype."""
        if dtype not in ROUNDED_DTYPES or self.build.nodes[index].dtype in ("bool", dtype):
            return index
        return self.build("cast", index, dtype=dtype)

    def add(self, op: str, *inputs: int, dtype: str | None = None, **attributes: Any) -> int:
        """Add an intermediate node: row-major, with the operands' dtype if ``dtype`` is None."""
        return self.build(op, *inputs, dtype=dtype, **attributes)

    def finish(self, op: str, *inputs: int, **attributes: Attribute) -> int:
        """Add the node of the call's result, with the shape, dtype and strides of ATen's result."""
        shape, strides = self.layout(self.result)
        dtype = dtype_name(self.result.dtype)
        index = self.build(op, *inputs, shape=shape, dtype=dtype, strides=strides, **attributes)
        if self.build.nodes[index].shape != shape:
            raise Unsupported("operands of unexpected shape")
        return index

    @property
    def dtype(self) -> str:
        """The dtype of the call's result."""
        return dtype_name(self.result.dtype)

    def shape(self, index: int) -> Shape:
        """The shape of a graph node."""
        return self.build.nodes[index].shape

    def static_size(self, axis: int, shape: Shape) -> int:
        """The length of an axis; raises :class:`Unsupported` if it is known at run time only."""
        if varies(shape[axis], self.build.varying):
            raise Unsupported("a number that is known at run time only")
        return shape[axis]

    def axis(self, axis: int, rank: int) -> int:
        """A possibly negative axis (or index along an axis of length ``rank``), counted from 0."""
        return axis + rank if axis < 0 else axis


def _is_number(argument: Any) -> bool:
    """Whether an argument is a number that the FX graph computes."""
    return isinstance(argument, Node) and isinstance(
        argument.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> str:
    """The dtype in which ATen computes: float32 for floats of at most 32 bits."""
    is_narrow = dtype.is_floating_point and dtype != torch.float64
    return "float32" if is_narrow else dtype_name(dtype)
