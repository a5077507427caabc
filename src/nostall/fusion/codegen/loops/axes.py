"""Which axes of different tensors are the same loop of a kernel: unification with splitting.

Every axis longer than 1 starts as an unknown of its own.  Elementwise operators say that two axes
are one; a view says that two rows of axes are one, so that (batch, heads * width) and
(batch, heads, width) split the wide axis into two.  What remains are the loops of the kernel, and
every tensor's axis is a few of them, outermost first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class AxisMismatch(Exception):
    """Two rows of axes have no common factors: (6, 4) seen as (4, 6)."""


@dataclass(eq=False)
class Axis:
    """A loop of ``size`` steps; once ``factors`` are known it stands for them, outermost first."""

    size: int
    factors: tuple[Axis, ...] = ()


AxisGroup = tuple[Axis, ...]
"""Loops that together count through one axis of a tensor, outermost first; () where it is 1."""


def new_axes(size: int) -> AxisGroup:
    """An axis about which nothing is known yet."""
    return () if size == 1 else (Axis(size),)


def factors(row: Iterable[Axis]) -> AxisGroup:
    """The loops that ``row`` stands for by now."""
    found: list[Axis] = []
    for axis in row:
        found.extend(factors(axis.factors) if axis.factors else (axis,))
    return tuple(found)


def unify(left: Iterable[Axis], right: Iterable[Axis]) -> None:
    """Make two rows of equal length the same loops.

    Raises :class:`AxisMismatch`, with what was unified until then left in place, where they have no
    common factors.
    """
    a, b = list(factors(left)), list(factors(right))
    while a and b:
        one, two = a.pop(), b.pop()
        if one is two:
            continue
        if one.size == two.size:
            two.factors = (one,)
        elif one.size > two.size:
            a.append(_split_axis(one, two.size))
            two.factors = (one.factors[-1],)
        else:
            b.append(_split_axis(two, one.size))
            one.factors = (two.factors[-1],)
        # Whatever was linked may stand in the rest of the rows too.
        a, b = list(factors(a)), list(factors(b))
    if a or b:
        raise AxisMismatch


def _split_axis(axis: Axis, inner: int) -> Axis:
    """Split ``axis`` into an outer part, which is returned, and an inner one of ``inner`` steps."""
    if axis.size % inner:
        raise AxisMismatch
    outer = Axis(axis.size // inner)
    axis.factors = (outer, Axis(inner))
    return outer


def regroup(row: Iterable[Axis], sizes: Sequence[int]) -> list[AxisGroup]:
    """The loops of ``row`` as axes of the given sizes, which have the same product.

    Raises :class:`AxisMismatch` where an axis would need a part of a loop that has no such part.
    """
    rest = list(factors(row))
    groups: list[AxisGroup] = []
    for size in reversed(sizes):
        group: list[Axis] = []
        need = size
        while need > 1:
            if not rest:
                raise AxisMismatch
            axis = rest.pop()
            if need % axis.size:
                rest.append(_split_axis(axis, need))
                axis = axis.factors[-1]
            group.append(axis)
            need //= axis.size
        groups.append(tuple(reversed(group)))
    if rest:
        raise AxisMismatch
    return groups[::-1]
