"""Which axes of different tensors are the same loop of a kernel: unification with splitting.

Every axis longer than 1 starts as an unknown of its own.  Elementwise operators say that two axes
are one; a view says that two rows of axes are one, so that (batch, heads * width) and
(batch, heads, width) split the wide axis into two.  What remains are the loops of the kernel, and
every tensor's axis is a few of them, outermost first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Mismatch(Exception):
    """Two rows of axes have no common factors: (6, 4) seen as (4, 6)."""


@dataclass(eq=False)
class Axis:
    """A loop of ``size`` steps; once ``parts`` are known it stands for them, outermost first."""

    size: int
    parts: tuple[Axis, ...] = ()


Row = tuple[Axis, ...]
"""Loops that together count through one axis of a tensor, outermost first; () where it is 1."""


def fresh(size: int) -> Row:
    """An axis about which nothing is known yet."""
    return () if size == 1 else (Axis(size),)


def leaves(row: Iterable[Axis]) -> Row:
    """The loops that ``row`` stands for by now."""
    found: list[Axis] = []
    for axis in row:
        found.extend(leaves(axis.parts) if axis.parts else (axis,))
    return tuple(found)


def unify(left: Iterable[Axis], right: Iterable[Axis]) -> None:
    """Make two rows of equal length the same loops.

    Raises :class:`Mismatch`, with what was unified until then left in place, where they have no
    common factors.
    """
    a, b = list(leaves(left)), list(leaves(right))
    while a and b:
        one, two = a.pop(), b.pop()
        if one is two:
            continue
        if one.size == two.size:
            two.parts = (one,)
        elif one.size > two.size:
            a.append(_split(one, two.size))
            two.parts = (one.parts[-1],)
        else:
            b.append(_split(two, one.size))
            one.parts = (two.parts[-1],)
        # Whatever was linked may stand in the rest of the rows too.
        a, b = list(leaves(a)), list(leaves(b))
    if a or b:
        raise Mismatch


def _split(axis: Axis, inner: int) -> Axis:
    """Split ``axis`` into an outer part, which is returned, and an inner one of ``inner`` steps."""
    if axis.size % inner:
        raise Mismatch
    outer = Axis(axis.size // inner)
    axis.parts = (outer, Axis(inner))
    return outer


def regroup(row: Iterable[Axis], sizes: Sequence[int]) -> list[Row]:
    """The loops of ``row`` as axes of the given sizes, which have the same product.

    Raises :class:`Mismatch` where an axis would need a part of a loop that has no such part.
    """
    rest = list(leaves(row))
    groups: list[Row] = []
    for size in reversed(sizes):
        group: list[Axis] = []
        need = size
        while need > 1:
            if not rest:
                raise Mismatch
            axis = rest.pop()
            if need % axis.size:
                rest.append(_split(axis, need))
                axis = axis.parts[-1]
            group.append(axis)
            need //= axis.size
        groups.append(tuple(reversed(group)))
    if rest:
        raise Mismatch
    return groups[::-1]
