"""Reference space and objective with a known optimum: permutations and their disorder."""

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
    """Move the number at one position to another."""

    position: int
    offset: int
    """Number of positions; negative towards the front."""

    @property
    def tags(self) -> Tags:
        return _tags(abs(self.offset))

    def __str__(self) -> str:
        return f"slide {self.position} by {self.offset:+d}"


class Permutations(Space[Order, Slide]):
    """Permutations of the numbers 0 to ``size`` - 1; the start state is in descending order.

    A move slides one number by up to ``reach`` positions; a slide past either end is illegal.
    Moves have the tags ``memory``, ``slide`` and ``distance=N``, which SIP draws by.
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

    def draw(
        self, state: Order, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> Slide | None:
        distances = [far for far in range(1, self.reach + 1) if required_tags <= _tags(far)]
        if not distances:
            return None
        position = int(rng.integers(self.size))
        choice = int(rng.integers(2 * len(distances)))
        distance = distances[choice // 2]
        offset = distance if choice % 2 else -distance
        return Slide(position, offset) if 0 <= position + offset < self.size else None

    def moves(self, state: Order) -> Iterator[Slide]:
        for position in range(self.size):
            for offset in range(-self.reach, self.reach + 1):
                if offset and 0 <= position + offset < self.size:
                    yield Slide(position, offset)

    def apply(self, state: Order, move: Slide) -> Order:
        target = move.position + move.offset
        if not (
            0 <= move.position < self.size
            and 0 <= target < self.size
            and 0 < abs(move.offset) <= self.reach
        ):
            raise IllegalMove(
                f"{move} does not fit {self.size} numbers; allowed are positions 0 to "
                f"{self.size - 1} and slides of 1 to {self.reach}; use moves from propose()"
            )
        others = [*state[: move.position], *state[move.position + 1 :]]
        return (*others[:target], state[move.position], *others[target:])

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
                f"{self.size - 1} once, with spaces between; load the text of dump()"
            )
        return state


class Disorder(Objective[Order]):
    """Artificial time in seconds: 1 us for ascending order, more for each displaced number.

    Each number adds 0.1 us for each position between its own and its place in ascending order. So
    there is one optimum, and many states have the same cost.
    """

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"
    optimum: ClassVar[float] = 1e-6

    def __init__(self, flops: float | None = 4e6) -> None:
        self.flops = flops

    def evaluate(self, states: Sequence[Order]) -> list[Measurement]:
        return [Measurement(self.unit, (self._seconds(state),), self.kind) for state in states]

    def _seconds(self, state: Order) -> float:
        displacement = sum(abs(number - position) for position, number in enumerate(state))
        return self.optimum * (10 + displacement) / 10


def _tags(distance: int) -> Tags:
    return frozenset({"memory", "slide", f"distance={distance}"})
