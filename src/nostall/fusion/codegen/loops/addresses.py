"""Where in memory a tile's elements are: integer expressions over row and column numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops

ZERO_TENSOR = "tl.zeros((1, 1), tl.int32)"
"""Added to a number to make it a tensor: every value of a kernel has two axes."""


@dataclass(frozen=True)
class Offset:
    """Elements from the start of a tensor: a constant and a weight for each loop."""

    start: int = 0
    strides: dict[int, int] = field(default_factory=dict)


def tensor_offset(
    places: Iterable[AxisAccess], strides: Iterable[int], sizes: Sequence[int]
) -> Offset:
    """Where a tensor with these strides is read at ``places``."""
    start = 0
    weights: dict[int, int] = {}
    for place, stride in zip(places, strides, strict=True):
        start += place.start * stride
        weight = stride * place.step
        for loop in reversed(place.loops):
            weights[loop] = weights.get(loop, 0) + weight
            weight *= sizes[loop]
    return Offset(start, {loop: weight for loop, weight in weights.items() if weight})


def offset_terms(offset: Offset, loops: Loops, sizes: Sequence[int], counter: str) -> list[str]:
    """The part of an offset that depends on the loops of ``loops``, through their ``counter``.

    Neighbouring loops that lie in memory as in the counter are one term.
    """
    found: list[str] = []
    at = len(loops)
    while at:
        last = at
        at -= 1
        weight = offset.strides.get(loops[at])
        if weight is None:
            continue
        whole = weight * sizes[loops[at]]
        while at and offset.strides.get(loops[at - 1]) == whole:
            at -= 1
            whole *= sizes[loops[at]]
        index = _counter_part(loops, at, last, sizes, counter)
        found.append(index if weight == 1 else f"{index} * {weight}")
    return found[::-1]


def missing_loop_masks(
    present: Iterable[int], loops: Loops, sizes: Sequence[int], counter: str
) -> list[str]:
    """Conditions under which all loops of ``loops`` that are not ``present`` stand at 0."""
    there = set(present)
    found = []
    at = 0
    while at < len(loops):
        first = at
        while at < len(loops) and loops[at] not in there:
            at += 1
        if at > first:
            found.append(f"({_counter_part(loops, first, at, sizes, counter)} == 0)")
        at += 1
    return found


def _counter_part(loops: Loops, first: int, last: int, sizes: Sequence[int], counter: str) -> str:
    """The number that loops ``first`` to ``last`` (without) of ``loops`` form in the counter."""
    inner = math.prod(sizes[loop] for loop in loops[last:])
    text = counter if inner == 1 else f"({counter} // {inner})"
    # The counter ends with its slowest loop: nothing to take off there.
    if not first:
        return text
    return f"({text} % {math.prod(sizes[loop] for loop in loops[first:last])})"
