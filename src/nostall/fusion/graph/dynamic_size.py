"""Dynamic sizes without symbols: an odd prime takes the place of a size known at run time only.

A graph may have one dynamic size (the batch). It is built with an odd prime in place of that size.
The prime is close to the expected size and divides no other size or stride of the graph. A number
of the graph depends on the dynamic size if and only if it is a multiple of the prime, and it scales
with the size by the same factor. Evaluators therefore see plain numbers close to the real ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from math import isqrt


def placeholder_prime(expected: int, static_sizes: Collection[int]) -> int:
    """The smallest odd prime from ``expected`` on that divides none of ``static_sizes``."""
    for number in count(max(3, expected) | 1, 2):
        if _is_prime(number) and not any(size and size % number == 0 for size in static_sizes):
            return number
    raise AssertionError("there are infinitely many primes")


def is_placeholder_prime(number: int) -> bool:
    """Whether a number can take the place of a dynamic size."""
    return number > 2 and number % 2 == 1 and _is_prime(number)


def resized(number: int, varying: int | None, size: int | None) -> int:
    """The value at run-time size ``size`` of a number from a graph built with prime ``varying``.

    Returns the number unchanged if ``varying`` or ``size`` is None. An :class:`Extent` or a
    :class:`Total` is recomputed from its parts, because rounding up is not linear in the size.
    """
    if varying is None or size is None:
        return int(number)
    if isinstance(number, Total):
        return sum(resized(extent, varying, size) for extent in number.extents)
    if isinstance(number, Extent):
        length = resized(number.length, varying, size)
        return -(-length // number.step) * number.unit
    return number // varying * size if number % varying == 0 else number


def varies(number: int, varying: int | None) -> bool:
    """Whether a number depends on the dynamic size."""
    return varying is not None and number > 0 and number % varying == 0


def depends_on_size(number: int, varying: int) -> bool:
    """Whether :func:`resized` gives other values of a number for other sizes."""
    if isinstance(number, Total):
        return any(depends_on_size(extent, varying) for extent in number.extents)
    if isinstance(number, Extent):
        return depends_on_size(number.length, varying)
    return varies(number, varying)


class Extent(int):
    """The int ``ceil(length / step) * unit``, with its parts as attributes, for :func:`resized`.

    As an int it has the value for the size that its graph was built with.
    """

    length: int
    step: int
    unit: int

    def __new__(cls, length: int, step: int = 1, unit: int = 1) -> Extent:
        extent = super().__new__(cls, -(-length // step) * unit)
        extent.length, extent.step, extent.unit = length, step, unit
        return extent


class Total(int):
    """A sum of extents, as an int with its terms as an attribute, for :func:`resized`."""

    extents: tuple[int, ...]

    def __new__(cls, extents: Iterable[int]) -> Total:
        terms = tuple(extents)
        total = super().__new__(cls, sum(terms))
        total.extents = terms
        return total


def _is_prime(number: int) -> bool:
    """Whether an odd number is prime."""
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
