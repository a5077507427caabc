"""Addresses of tensor elements: Triton index expressions over row and column counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops

ZERO_TENSOR = "tl.zeros((1, 1), tl.int32)"
"""Added to a scalar to make it a tensor: every value of a kernel is a two-dimensional tensor."""


@dataclass(frozen=True)
class Offset:
    """An affine offset in elements from the start of a tensor: ``start + sum(stride * loop)``."""

    start: int = 0
    strides: dict[int, int] = field(default_factory=dict)
    """Elements by which one step of a loop moves the offset; loops that do not move it are left
    out."""


def tensor_offset(
    accesses: Iterable[AxisAccess], strides: Iterable[int], sizes: Sequence[int]
) -> Offset:
    """The offset of a tensor with these strides, if its axes are read at ``accesses``."""
    start = 0
    loop_strides: dict[int, int] = {}
    for access, axis_stride in zip(accesses, strides, strict=True):
        start += access.start * axis_stride
        stride = axis_stride * access.step
        for loop in reversed(access.loops):
            loop_strides[loop] = loop_strides.get(loop, 0) + stride
            stride *= sizes[loop]
    return Offset(start, {loop: stride for loop, stride in loop_strides.items() if stride})


def offset_terms(offset: Offset, loops: Loops, sizes: Sequence[int], counter: str) -> list[str]:
    """The terms of an offset that depend on ``loops``, as expressions of their ``counter``.

    Adjacent loops that are contiguous in memory as well as in the counter share one term.
    """
    terms: list[str] = []
    position = len(loops)
    while position:
        end = position
        position -= 1
        stride = offset.strides.get(loops[position])
        if stride is None:
            continue
        outer_stride = stride * sizes[loops[position]]
        while position and offset.strides.get(loops[position - 1]) == outer_stride:
            position -= 1
            outer_stride *= sizes[loops[position]]
        index = _loop_index(loops, position, end, sizes, counter)
        terms.append(index if stride == 1 else f"{index} * {stride}")
    return terms[::-1]


def missing_loop_masks(
    present: Iterable[int], loops: Loops, sizes: Sequence[int], counter: str
) -> list[str]:
    """Conditions that hold if all loops of ``loops`` outside ``present`` are at index 0."""
    present_loops = set(present)
    masks = []
    position = 0
    while position < len(loops):
        first = position
        while position < len(loops) and loops[position] not in present_loops:
            position += 1
        if position > first:
            masks.append(f"({_loop_index(loops, first, position, sizes, counter)} == 0)")
        position += 1
    return masks


def _loop_index(loops: Loops, first: int, end: int, sizes: Sequence[int], counter: str) -> str:
    """The joint index of ``loops[first:end]``, extracted from the counter by // and %."""
    inner = math.prod(sizes[loop] for loop in loops[end:])
    text = counter if inner == 1 else f"({counter} // {inner})"
    # No loop is slower than the first one, so its index needs no modulo.
    if not first:
        return text
    return f"({text} % {math.prod(sizes[loop] for loop in loops[first:end])})"
