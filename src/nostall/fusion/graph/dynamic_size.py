"""Dynamic sizes without symbols: an odd prime takes the place of each size known at run time only.

A graph is built with a prime in place of each dynamic size (the batch, a length). Each prime is
close to the expected size and divides no static size or stride of the graph. The graph's *varying*
number is the product of its primes. A number of the graph depends on a dynamic size if and only if
it is a multiple of that prime, and it scales with the size by the same factor, once for each time
that the prime divides it. Evaluators therefore see plain numbers close to the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import count
from math import isqrt
from typing import Any

Size = int | tuple[int, ...]
"""The dynamic size of a graph; if it has several, those in ascending order of their primes."""


def placeholder_prime(expected: int, static_sizes: Collection[int]) -> int:
    """The smallest odd prime from ``expected`` on that divides none of ``static_sizes``."""
    for number in count(max(3, expected) | 1, 2):
        if _is_prime(number) and not any(size and size % number == 0 for size in static_sizes):
            return number
    raise AssertionError("there are infinitely many primes")


@cache
def primes_of(varying: int) -> tuple[int, ...]:
    """The primes of the dynamic sizes, ascending."""
    primes, rest, divisor = [], varying, 3
    while rest > 1:
        if divisor * divisor > rest:
            divisor = rest
        if rest % divisor == 0:
            primes.append(divisor)
            rest //= divisor
        else:
            divisor += 2
    return tuple(primes)


def is_placeholder(number: int) -> bool:
    """Whether a number can take the place of dynamic sizes: a product of different odd primes."""
    return number > 2 and number % 2 == 1 and math.prod(set(primes_of(number))) == number


def factors(number: int, varying: int) -> tuple[int, tuple[int, ...]]:
    """A number as its constant factor, and how often it is a multiple of each dynamic size."""
    powers = []
    for prime in primes_of(varying):
        power = 0
        while number and number % prime == 0:
            number, power = number // prime, power + 1
        powers.append(power)
    return number, tuple(powers)


def resized(number: int, varying: int | None, size: Size | None) -> int:
    """The value at run-time size ``size`` of a number from a graph built with ``varying``.

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
    if not varies(number, varying):
        return number
    sizes = size if isinstance(size, tuple) else (size,)
    result, powers = factors(number, varying)
    for each, power in zip(sizes, powers, strict=True):
        for _ in range(power):
            result = result * each
    return result


def varies(number: int, varying: int | None) -> bool:
    """Whether a number depends on a dynamic size."""
    return varying is not None and number > 0 and math.gcd(number, varying) > 1


def depends_on_size(number: int, varying: int) -> bool:
    """Whether :func:`resized` gives other values of a number for other sizes."""
    return used_sizes([number], varying) is not None


def used_sizes(numbers: Iterable[int], varying: int | None) -> int | None:
    """The part of ``varying`` that these numbers depend on; None if they depend on no size."""
    if varying is None:
        return None
    used = math.lcm(*(_used(number, varying) for number in numbers))
    return used if used > 1 else None


def _used(number: int, varying: int) -> int:
    if isinstance(number, Total):
        return used_sizes(number.extents, varying) or 1
    if isinstance(number, Extent):
        return _used(number.length, varying)
    return math.gcd(number, varying) if number > 0 else 1


def placeholder_size(varying: int | None) -> Size | None:
    """The primes of a graph as its dynamic sizes."""
    primes = () if varying is None else primes_of(varying)
    return primes if len(primes) > 1 else next(iter(primes), None)


def part_of_size(size: Size | None, varying: int | None, part: int | None) -> Size | None:
    """Of the sizes of a graph with ``varying``, those of its part with ``part``."""
    if size is None or varying is None or part is None:
        return None
    sizes = size if isinstance(size, tuple) else (size,)
    pairs = zip(primes_of(varying), sizes, strict=True)
    kept = tuple(each for prime, each in pairs if part % prime == 0)
    return kept if len(kept) > 1 else kept[0]


class SizeReader:
    """Reads the dynamic sizes of a kernel from the shapes of its tensors."""

    def __init__(self, varying: int | None, shapes: Iterable[Sequence[int]]) -> None:
        """``shapes``: of the tensors, with primes in place of dynamic sizes."""
        self._order: list[int] = []
        # Tensor, axis, constant factor, and the known sizes that divide each length that is read.
        self._steps: list[tuple[int, int, int, tuple[int, ...]]] = []
        self._primes = () if varying is None else primes_of(varying)
        places = [
            (tensor, axis, *factors(length, varying))
            for tensor, shape in enumerate(shapes)
            for axis, length in enumerate(shape)
            if varying is not None and varies(length, varying)
        ]
        while step := next(filter(None, (self._step(*place) for place in places)), None):
            self._steps.append(step)

    def _step(
        self, tensor: int, axis: int, factor: int, powers: tuple[int, ...]
    ) -> tuple[int, int, int, tuple[int, ...]] | None:
        """How to read a size from a length, if that has one unknown size, once."""
        parts = [at for at, power in enumerate(powers) for _ in range(power)]
        unknown = [at for at in parts if at not in self._order]
        if len(unknown) != 1:
            return None
        known = tuple(self._order.index(at) for at in parts if at in self._order)
        self._order.append(unknown[0])
        return tensor, axis, factor, known

    @property
    def is_complete(self) -> bool:
        """Whether the tensors show all sizes."""
        return len(self._order) == len(self._primes)

    def __call__(self, shapes: Sequence[Sequence[Any]]) -> Size | None:
        """The sizes in tensors of these shapes; None if there are none, or none is shown."""
        found: list[Any] = []
        for tensor, axis, factor, known in self._steps:
            length = shapes[tensor][axis]
            for at in known:
                length = length // found[at] if found[at] else 0
            found.append(length // factor)
        if len(found) < 2 or not self.is_complete:
            return found[0] if found and self.is_complete else None
        return tuple(found[self._order.index(at)] for at in range(len(found)))


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
