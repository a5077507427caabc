"""The shape that an operation gives, from those of its operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nostall.fusion.graph.operations import ELEMENTWISE, OPERATIONS, Attribute

Shape = tuple[int, ...]


def contiguous(shape: Shape) -> Shape:
    """Strides in elements of a row-major tensor, as PyTorch gives them (an axis of 0 counts 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """What the shapes broadcast to (aligned at the last axis); None where they do not fit."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def result_shape(
    op: str, operands: Sequence[Shape], attributes: Mapping[str, Attribute], wanted: Shape
) -> Shape | None:
    """The shape of ``op``'s result; None where operands or attributes do not fit.

    ``wanted`` decides where the operation leaves a choice: leaves, views, broadcasts and slices.
    """
    kind = OPERATIONS[op].kind
    if op == "iota":
        return wanted if len(wanted) == 1 else None
    if op == "random":
        known = attributes.get("words") in (1, 4, 8)
        return wanted if known and operands[0] == (1,) and wanted else None
    if kind in ELEMENTWISE:
        return broadcast(operands)
    if kind == "reduce":
        return _reduced(operands[0], attributes["dims"], bool(attributes["keepdim"]))
    if op == "view":
        return wanted if math.prod(wanted) == math.prod(operands[0]) else None
    if op == "expand":
        return wanted if broadcast([operands[0], wanted]) == wanted else None
    if op == "permute":
        return _permuted(operands[0], attributes["dims"])
    if op == "slice":
        return _sliced(operands[0], attributes, wanted)
    if kind == "dot":
        return _dotted(*operands)
    return wanted


def _axes(value: Attribute, rank: int) -> tuple[int, ...] | None:
    """Different axes of a tensor, ascending where they are to be removed."""
    if not isinstance(value, tuple) or len(set(value)) < len(value):
        return None
    return value if all(0 <= axis < rank for axis in value) else None


def _reduced(operand: Shape, dims: Attribute, keepdim: bool) -> Shape | None:
    axes = _axes(dims, len(operand))
    if not axes or list(axes) != sorted(axes):
        return None
    sizes = ((1 if axis in axes else size, axis in axes) for axis, size in enumerate(operand))
    return tuple(size for size, gone in sizes if keepdim or not gone)


def _permuted(operand: Shape, dims: Attribute) -> Shape | None:
    axes = _axes(dims, len(operand))
    if axes is None or len(axes) != len(operand):
        return None
    return tuple(operand[axis] for axis in axes)


def _sliced(operand: Shape, attributes: Mapping[str, Attribute], wanted: Shape) -> Shape | None:
    dim, start, step = (attributes[name] for name in ("dim", "start", "step"))
    if not (isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)):
        return None
    if not (0 <= dim < len(operand) == len(wanted) and start >= 0 and step >= 1):
        return None
    last = start + step * (wanted[dim] - 1)
    if wanted[dim] and last >= operand[dim]:
        return None
    return (*operand[:dim], wanted[dim], *operand[dim + 1 :])


def _dotted(left: Shape, right: Shape) -> Shape | None:
    if len(left) < 2 or len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    return (*left[:-1], right[-1]) if left[-1] == right[-2] else None
