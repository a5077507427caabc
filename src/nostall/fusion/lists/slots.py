"""Slots: the positions of a list, and the blocks of a kernel's grid that compute each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nostall.fusion.capture.call import Unsupported
from nostall.fusion.codegen.expressions.lines import Lines

MAX_POINTERS = 480
"""Pointers that one launch takes: with Triton's own they fit into 4 KiB, the size of parameters on
every GPU."""
MAX_SLOT_ELEMENTS = 2**31 - 2**20
"""Kernels count elements in 32 bits, and round up to blocks."""


@dataclass(frozen=True)
class Slot:
    """Layout of the tensors at one position of the lists; sizes and strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def slot_of(value: Any) -> Slot:
    """The slot of a fake tensor.

    Raises :class:`Unsupported` if sizes are dynamic, or the elements do not fill their memory.
    """
    sizes = (*value.shape, *value.stride())
    if not all(isinstance(size, int) for size in sizes):
        raise Unsupported("a list of tensors of dynamic size")
    slot = Slot(tuple(value.shape), tuple(value.stride()))
    if slot.elements > MAX_SLOT_ELEMENTS:
        raise Unsupported("a tensor of a list has more elements than kernels count")
    if slot.elements > 1 and not _is_dense(slot):
        raise Unsupported("a tensor of a list has gaps or overlaps in its memory")
    return slot


def _is_dense(slot: Slot) -> bool:
    """Whether the elements fill consecutive memory, each once."""
    expected = 1
    for stride, size in sorted(zip(slot.strides, slot.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def has_same_memory_order(a: Slot, b: Slot) -> bool:
    """Whether equal positions in memory hold equal elements; axes of size 1 may have any stride."""
    if a.shape != b.shape:
        return False
    pairs = zip(a.shape, a.strides, b.strides, strict=True)
    return a.elements <= 1 or all(size == 1 or x == y for size, x, y in pairs)


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a grid that compute one slot."""

    slot: int
    first: int
    blocks: int


def spans(slots: Sequence[Slot], wanted: Sequence[int], block: int) -> tuple[Span, ...]:
    """Blocks of ``block`` elements for the slots ``wanted``, in order; empty slots get none."""
    found, first = [], 0
    for index in wanted:
        blocks = -(-slots[index].elements // block)
        if blocks:
            found.append(Span(index, first, blocks))
            first += blocks
    return tuple(found)


def split_slots(count: int, pointers_each: int, shared: int) -> Iterator[tuple[int, ...]]:
    """Slots of each launch, so that its pointers fit.

    Raises :class:`Unsupported` if the pointers of a single slot do not.
    """
    most = (MAX_POINTERS - shared) // max(1, pointers_each)
    if most < 1:
        raise Unsupported(f"{pointers_each} tensors for each result; a launch takes {MAX_POINTERS}")
    for start in range(0, count, most):
        yield tuple(range(start, min(count, start + most)))


def write_selection(
    lines: Lines, spans: Sequence[Span], write_leaf: Callable[[Lines, Span], None]
) -> None:
    """Write a binary search by ``pid`` for the span of a block; a leaf assigns its variables."""
    if len(spans) == 1:
        write_leaf(lines, spans[0])
        return
    middle = len(spans) // 2
    with lines.block(f"if pid < {spans[middle].first}:"):
        write_selection(lines, spans[:middle], write_leaf)
    with lines.block("else:"):
        write_selection(lines, spans[middle:], write_leaf)


def int_scalar(value: int) -> str:
    """A number that may differ between the leaves of a selection."""
    return f"tl.full((), {value}, tl.int32)"
