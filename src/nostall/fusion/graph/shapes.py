"""Shape inference: the shape of an operation's result from the shapes of its operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nostall.fusion.graph.operations import ELEMENTWISE, OPERATIONS, Attribute

Shape = tuple[int, ...]


def contiguous_strides(shape: Shape) -> Shape:
    """Strides in elements of a row-major tensor; an axis of size 0 counts as 1, as in PyTorch."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def span(shape: Shape, strides: Shape) -> int:
    """Elements between the first and the last one of a tensor, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def broadcast_shape(shapes: Sequence[Shape]) -> Shape | None:
    """The shape that the shapes broadcast to (aligned at the last axis); None if they cannot."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        not_one = {size for size in sizes if size != 1}
        if len(not_one) > 1:
            return None
        result.append(not_one.pop() if not_one else 1)
    return tuple(result)


def result_shape(
    op: str, operands: Sequence[Shape], attributes: Mapping[str, Attribute], shape: Shape
) -> Shape | None:
    """The shape of the result of ``op``; None if operands or attributes do not fit.

    ``shape`` is the shape for operations whose operands do not determine it: inputs, constants,
    opaque nodes, views, expand, slice, iota and random.
    """
    kind = OPERATIONS[op].kind
    if op == "iota":
        return shape if len(shape) == 1 else None
    if op == "random":
        is_valid = attributes.get("words") in (1, 4, 8) and operands[0] == (1,)
        return shape if is_valid and shape else None
    if kind in ELEMENTWISE:
        return broadcast_shape(operands)
    if kind == "reduce":
        return _reduced_shape(operands[0], attributes["dims"], bool(attributes["keepdim"]))
    if op == "view":
        return shape if math.prod(shape) == math.prod(operands[0]) else None
    if op == "expand":
        return shape if broadcast_shape([operands[0], shape]) == shape else None
    if op == "permute":
        return _permuted_shape(operands[0], attributes["dims"])
    if op == "slice":
        return _sliced_shape(operands[0], attributes, shape)
    if kind == "dot":
        return _dot_shape(*operands)
    return shape


def _axes(value: Attribute, rank: int) -> tuple[int, ...] | None:
    """An attribute as distinct axes of a tensor of this rank; None if it is something else."""
    if not isinstance(value, tuple) or len(set(value)) < len(value):
        return None
    return value if all(0 <= axis < rank for axis in value) else None


def _reduced_shape(operand: Shape, dims: Attribute, keepdim: bool) -> Shape | None:
    axes = _axes(dims, len(operand))
    if not axes or list(axes) != sorted(axes):
        return None
    sizes = ((1 if axis in axes else size, axis in axes) for axis, size in enumerate(operand))
    return tuple(size for size, is_reduced in sizes if keepdim or not is_reduced)


def _permuted_shape(operand: Shape, dims: Attribute) -> Shape | None:
    axes = _axes(dims, len(operand))
    if axes is None or len(axes) != len(operand):
        return None
    return tuple(operand[axis] for axis in axes)


def _sliced_shape(
    operand: Shape, attributes: Mapping[str, Attribute], shape: Shape
) -> Shape | None:
    dim, start, step = (attributes[name] for name in ("dim", "start", "step"))
    if not (isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)):
        return None
    if not (0 <= dim < len(operand) == len(shape) and start >= 0 and step >= 1):
        return None
    last = start + step * (shape[dim] - 1)
    if shape[dim] and last >= operand[dim]:
        return None
    return (*operand[:dim], shape[dim], *operand[dim + 1 :])


def _dot_shape(left: Shape, right: Shape) -> Shape | None:
    if len(left) < 2 or len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    return (*left[:-1], right[-1]) if left[-1] == right[-2] else None
