"""A size that is known at run time only (the batch), without symbols.

A graph with such a size is made with an odd prime in its place, near the size that is expected and
no factor of any other size or stride.  A multiple of that prime is then what varies, by the same
factor; all else stays.  Evaluators see plain numbers near the expected ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from math import isqrt


def stand_in(expected: int, others: Collection[int]) -> int:
    """The smallest odd prime from ``expected`` on that divides none of ``others``."""
    for number in count(max(3, expected) | 1, 2):
        if _is_prime(number) and not any(other and other % number == 0 for other in others):
            return number
    raise AssertionError("there is always another prime")


def is_stand_in(number: int) -> bool:
    """Whether a number can stand for a size that varies."""
    return number > 2 and number % 2 == 1 and _is_prime(number)


def resized(number: int, varying: int | None, size: int | None) -> int:
    """What a number of a graph made with ``varying`` is at ``size``; itself where either is None.

    Numbers that were rounded up are :class:`Extent` or :class:`Total` and know how.
    """
    if varying is None or size is None:
        return int(number)
    if isinstance(number, Total):
        return sum(resized(extent, varying, size) for extent in number.extents)
    if isinstance(number, Extent):
        whole = resized(number.whole, varying, size)
        return -(-whole // number.step) * number.unit
    return number // varying * size if number % varying == 0 else number


def varies(number: int, varying: int | None) -> bool:
    """Whether a number changes with the size."""
    return varying is not None and number > 0 and number % varying == 0


class Extent(int):
    """``whole`` things in groups of ``step``, the last one not full, times ``unit``: an int for
    the size that its graph was made with."""

    whole: int
    step: int
    unit: int

    def __new__(cls, whole: int, step: int = 1, unit: int = 1) -> Extent:
        made = super().__new__(cls, -(-whole // step) * unit)
        made.whole, made.step, made.unit = whole, step, unit
        return made


class Total(int):
    """A sum of extents."""

    extents: tuple[int, ...]

    def __new__(cls, extents: Iterable[int]) -> Total:
        every = tuple(extents)
        made = super().__new__(cls, sum(every))
        made.extents = every
        return made


def _is_prime(number: int) -> bool:
    """Of an odd number."""
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
