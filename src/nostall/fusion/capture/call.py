"""One ATen call while it is lowered: its operands as nodes of the graph that is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.operations import Attribute
from nostall.fusion.graph.shapes import Shape

Value = int | tuple[int, ...]
"""A node of the operator graph, or one for each part of a result of several tensors."""


Layout = Callable[[torch.Tensor], tuple[Shape, Shape]]
"""Shape and strides of a fake tensor as numbers."""


class Unfit(Exception):
    """Why an operator is left to others; the text is counted, so it names no sizes."""


class Call:
    """One ATen call: its operands as nodes of the graph that is built."""

    def __init__(
        self, node: Node, build: Builder, values: Mapping[Node, Value], layout: Layout
    ) -> None:
        self.node = node
        self.build = build
        self.values = values
        self.layout = layout
        self.result: torch.Tensor = node.meta["val"]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """What was passed at a place or by name; raises :class:`Unfit` for numbers that are known
        at run time only."""
        args = self.node.args
        given = args[place] if place < len(args) else self.node.kwargs.get(name, default)
        for one in given if isinstance(given, (list, tuple)) else [given]:
            if _is_number(one):
                raise Unfit("a number that is known at run time only")
        return given

    def tensor(self, place: int) -> int:
        """The node of a tensor operand."""
        operand = self.node.args[place]
        if _is_number(operand):
            raise Unfit("a number that is known at run time only")
        value = self.values.get(operand) if isinstance(operand, Node) else None
        if not isinstance(value, int):
            raise Unfit("an operand is no tensor")
        return value

    def operand(self, place: int) -> int:
        """The node of an operand, a constant where it is a number."""
        given = self.node.args[place]
        if isinstance(given, (bool, int, float)):
            return self.number(given)
        return self.tensor(place)

    def number(self, value: bool | int | float, dtype: str | None = None) -> int:
        """A constant; numbers do not widen the tensors that they meet."""
        return self.build.constant(value, dtype or self._dtype_beside(value))

    def _dtype_beside(self, value: bool | int | float) -> str:
        tensors = [arg.meta["val"] for arg in self.node.all_input_nodes]
        beside = next((t.dtype for t in tensors if t.dim() > 0), None)
        beside = beside or next((t.dtype for t in tensors), torch.float32)
        dtype = torch.result_type(torch.empty(1, dtype=beside), value)
        return "float64" if dtype == torch.float64 else wide(dtype)

    def add(self, op: str, *inputs: int, dtype: str | None = None, **attributes: Any) -> int:
        """An inner step: row-major, of the operands' dtype where none is said."""
        return self.build(op, *inputs, dtype=dtype, **attributes)

    def finish(self, op: str, *inputs: int, **attributes: Attribute) -> int:
        """The last step: shape, dtype and strides are those that ATen gives."""
        shape, strides = self.layout(self.result)
        dtype = dtype_name(self.result.dtype)
        made = self.build(op, *inputs, shape=shape, dtype=dtype, strides=strides, **attributes)
        if self.build.nodes[made].shape != shape:
            raise Unfit("operands of unexpected shape")
        return made

    @property
    def dtype(self) -> str:
        """The dtype of the result."""
        return dtype_name(self.result.dtype)

    def shape(self, index: int) -> Shape:
        """The shape of a node."""
        return self.build.nodes[index].shape

    def fixed(self, axis: int, shape: Shape) -> int:
        """The length of an axis that a number is computed from; raises :class:`Unfit` where it is
        known at run time only."""
        if varies(shape[axis], self.build.varying):
            raise Unfit("a number that is known at run time only")
        return shape[axis]

    def axis(self, axis: int, rank: int) -> int:
        """An axis, or a place on one, counted from 0."""
        return axis + rank if axis < 0 else axis


def _is_number(argument: Any) -> bool:
    """Whether an argument is computed, but no tensor."""
    return isinstance(argument, Node) and isinstance(
        argument.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> str:
    """What ATen computes in: fp32 for the narrow floats."""
    narrow = dtype.is_floating_point and dtype != torch.float64
    return "float32" if narrow else dtype_name(dtype)
