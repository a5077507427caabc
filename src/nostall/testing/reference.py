"""A tiny space whose optimum is known: for documentation, tests and first steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nostall.core import BadInput, IllegalMove, Measurement, Objective, Space, Tags
from nostall.core.measurement import Kind
from nostall.core.space import NO_TAGS

Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slide:
    """Take the number at place ``at`` and put it ``by`` places further on (back when negative)."""

    at: int
    by: int

    @property
    def tags(self) -> Tags:
        return _tags(abs(self.by))

    def __str__(self) -> str:
        return f"slide {self.at} by {self.by:+d}"


class Permutations(Space[Order, Slide]):
    """The orders of the numbers 0 … ``size`` - 1, from the last down to 0 at the start.

    A move slides one number by up to ``reach`` places; to slide it over the edge is illegal.
    Moves carry the tags ``memory``, ``slide`` and ``distance=N``, as SIP asks for them.
    """

    def __init__(self, size: int = 5, reach: int = 2) -> None:
        if size < 1 or reach < 1:
            raise BadInput(
                f"Permutations got size={size}, reach={reach}; both must be at least 1; try "
                "Permutations(5, 2)"
            )
        self.size = size
        self.reach = reach

    def start(self) -> Order:
        return tuple(reversed(range(self.size)))

    def draw(self, state: Order, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> Slide | None:
        distances = [far for far in range(1, self.reach + 1) if wanted <= _tags(far)]
        if not distances:
            return None
        at = int(rng.integers(self.size))
        choice = int(rng.integers(2 * len(distances)))
        far = distances[choice // 2]
        by = far if choice % 2 else -far
        return Slide(at, by) if 0 <= at + by < self.size else None

    def moves(self, state: Order) -> Iterator[Slide]:
        for at in range(self.size):
            for by in range(-self.reach, self.reach + 1):
                if by and 0 <= at + by < self.size:
                    yield Slide(at, by)

    def apply(self, state: Order, move: Slide) -> Order:
        to = move.at + move.by
        if not (
            0 <= move.at < self.size and 0 <= to < self.size and 0 < abs(move.by) <= self.reach
        ):
            raise IllegalMove(
                f"{move} does not fit {self.size} numbers; allowed are places 0 to "
                f"{self.size - 1} and slides of 1 to {self.reach}; take moves from propose()"
            )
        rest = [*state[: move.at], *state[move.at + 1 :]]
        return (*rest[:to], state[move.at], *rest[to:])

    def key(self, state: Order) -> bytes:
        return self.dump(state).encode()

    def dump(self, state: Order) -> str:
        return " ".join(map(str, state))

    def load(self, text: str) -> Order:
        try:
            state = tuple(int(word) for word in text.split())
        except ValueError:
            state = ()
        if sorted(state) != list(range(self.size)):
            raise BadInput(
                f"{text[:60]!r} is no order of {self.size} numbers; allowed is each of 0 to "
                f"{self.size - 1} once, with spaces between; load what dump() gave"
            )
        return state


class Disorder(Objective[Order]):
    """A made-up time in seconds: 1 µs for the ascending order, more the further from it.

    Each number adds 0.1 µs for each place that it is away from its own, so the ascending order is
    the one optimum, and many states cost the same.
    """

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"
    optimum: ClassVar[float] = 1e-6

    def __init__(self, flops: float | None = 4e6) -> None:
        self.flops = flops

    def evaluate(self, states: Sequence[Order]) -> list[Measurement]:
        return [Measurement(self.unit, (self._seconds(state),), self.kind) for state in states]

    def _seconds(self, state: Order) -> float:
        away = sum(abs(number - place) for place, number in enumerate(state))
        return self.optimum * (10 + away) / 10


def _tags(far: int) -> Tags:
    return frozenset({"memory", "slide", f"distance={far}"})
