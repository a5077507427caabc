"""Addresses of tensor elements: Triton index expressions over row and column counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.shapes import contiguous_strides

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


def counter_offsets(
    node: Node,
    accesses: Sequence[AxisAccess],
    sizes: Sequence[int],
    loop_groups: Sequence[Loops],
) -> tuple[Offset, ...]:
    """The operands of a random tensor's template: (element number,) if ``words`` is 1, else
    (counter, remainder) with ``words * counter + remainder`` = element number.

    A Philox counter gives four words of 32 bits. The attribute ``words`` of a random tensor says
    how many elements share a counter; i is the number of an element in row-major order:

    - 1: element i has counter i.
    - 4: element i has word ``i % 4`` of counter ``i // 4``. Four neighbours in the registers of a
      thread cost one counter.
    - 8: element i has half ``i % 2`` (the low half first) of word ``i // 2 % 4`` of counter
      ``i // 8``. The random number of a half h is (h + 1/2) / 65536.

    So a random number depends on the tensor and the element, not on the kernel that computes it.

    ``loop_groups``: the loops that share an index of the kernel, such as all column loops. A group
    whose steps are multiples of ``words`` is in the counter part, so the remainder is short and the
    compiler sees which elements share a counter.
    """
    number = tensor_offset(accesses, contiguous_strides(node.shape), sizes)
    words = node["words"]
    assert isinstance(words, int)
    if words == 1:
        return (number,)
    strides = number.strides
    counter_loops = {
        loop
        for group in loop_groups
        if all(strides.get(loop, 0) % words == 0 for loop in group)
        for loop in group
    }
    counter = {loop: step // words for loop, step in strides.items() if loop in counter_loops}
    remainder = {loop: step for loop, step in strides.items() if loop not in counter_loops}
    return Offset(strides=counter), Offset(strides=remainder)
