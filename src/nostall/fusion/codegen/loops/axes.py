"""Unification of tensor axes: which axes of different tensors are the same loop of a kernel.

Every axis longer than 1 starts as an unknown.  An elementwise operator equates the axes of its
operands with its own.  A view equates two lists of axes, so (batch, heads * width) and
(batch, heads, width) split the combined axis into two.  The axes that remain are the loops of the
kernel, and every axis of a tensor is a list of loops, outermost first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class AxisMismatch(Exception):
    """Two lists of axes have no common factorization: (6, 4) viewed as (4, 6)."""


@dataclass(eq=False)
class Axis:
    """A loop of ``size`` iterations, or the product of its ``factors`` once they are known."""

    size: int
    factors: tuple[Axis, ...] = ()
    """The axes that replace this one, outermost first; () if it is a loop itself."""


AxisGroup = tuple[Axis, ...]
"""Loops that together index one axis of a tensor, outermost first; () for an axis of size 1."""


def new_axes(size: int) -> AxisGroup:
    """A new unknown axis of ``size``."""
    return () if size == 1 else (Axis(size),)


def factors(axes: Iterable[Axis]) -> AxisGroup:
    """The loops that ``axes`` consist of, with every known factorization expanded."""
    loops: list[Axis] = []
    for axis in axes:
        loops.extend(factors(axis.factors) if axis.factors else (axis,))
    return tuple(loops)


def unify(left: Iterable[Axis], right: Iterable[Axis]) -> None:
    """Make two lists of axes with the same product the same loops.

    Raises :class:`AxisMismatch` if they have no common factorization.  Axes that were unified
    until then stay unified.
    """
    left_rest, right_rest = list(factors(left)), list(factors(right))
    while left_rest and right_rest:
        a, b = left_rest.pop(), right_rest.pop()
        if a is b:
            continue
        if a.size == b.size:
            b.factors = (a,)
        elif a.size > b.size:
            left_rest.append(_split_axis(a, b.size))
            b.factors = (a.factors[-1],)
        else:
            right_rest.append(_split_axis(b, a.size))
            a.factors = (b.factors[-1],)
        # The axes that just got factors can occur in the rest of both lists.
        left_rest, right_rest = list(factors(left_rest)), list(factors(right_rest))
    if left_rest or right_rest:
        raise AxisMismatch


def _split_axis(axis: Axis, inner: int) -> Axis:
    """Split ``axis`` into an outer axis and an inner one of size ``inner``; returns the outer."""
    if axis.size % inner:
        raise AxisMismatch
    outer = Axis(axis.size // inner)
    axis.factors = (outer, Axis(inner))
    return outer


def regroup(axes: Iterable[Axis], sizes: Sequence[int]) -> list[AxisGroup]:
    """Partition the loops of ``axes`` into one group for each of ``sizes`` (the same product).

    Splits loops if necessary.  Raises :class:`AxisMismatch` if a size does not divide the loop
    that it would have to split.
    """
    rest = list(factors(axes))
    groups: list[AxisGroup] = []
    for size in reversed(sizes):
        group: list[Axis] = []
        missing = size
        while missing > 1:
            if not rest:
                raise AxisMismatch
            axis = rest.pop()
            if missing % axis.size:
                rest.append(_split_axis(axis, missing))
                axis = axis.factors[-1]
            group.append(axis)
            missing //= axis.size
        groups.append(tuple(reversed(group)))
    if rest:
        raise AxisMismatch
    return groups[::-1]
