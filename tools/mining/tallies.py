"""Counts of sightings, by pair and distance, with the number of different functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[str, str, str, str, int]
"""(kind, exact name, name of the form, name of the class, distance in cycles)."""

MIN_SEEN = 3
"""Occurrences at or below a distance from which the distance counts."""
MIN_FUNCTIONS = 2
"""Different functions with such an occurrence from which the distance counts."""


@dataclass(slots=True)
class Tally:
    """How often one distance of a pair was seen."""

    seen: int
    functions: int
    """Number of different functions."""
    example: bytes
    """Key of the first of them."""


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest distance of a pair that was seen often enough."""

    distance: int
    seen: int
    """Occurrences at all distances."""
    functions: int
    """Different functions, at least."""


@dataclass(slots=True)
class Tallies:
    """The sightings in some functions of one architecture."""

    tallies: dict[Key, Tally] = field(default_factory=dict[Key, Tally])
    functions: int = 0
    instructions: int = 0

    def add_function(self, key: bytes, instructions: int, found: Mapping[Key, int]) -> None:
        """Add one function; ``key`` tells functions apart."""
        self.functions += 1
        self.instructions += instructions
        for name, seen in found.items():
            tally = self.tallies.get(name)
            if tally is None:
                self.tallies[name] = Tally(seen, 1, key[:4])
            else:
                tally.seen += seen
                tally.functions += 1

    def add(self, more: Tallies) -> None:
        """Add the sightings in other functions."""
        self.functions += more.functions
        self.instructions += more.instructions
        for name, other in more.tallies.items():
            tally = self.tallies.get(name)
            if tally is None:
                self.tallies[name] = Tally(other.seen, other.functions, other.example)
            else:
                tally.seen += other.seen
                tally.functions += other.functions


def least(tallies: Iterable[tuple[int, Tally]]) -> Least | None:
    """The smallest distance that counts, from (distance, tally) of one pair; None if none does."""
    by_distance: dict[int, list[Tally]] = defaultdict(list)
    for distance, tally in tallies:
        by_distance[distance].append(tally)
    seen, examples, has_functions = 0, set[bytes](), False
    total = sum(t.seen for rows in by_distance.values() for t in rows)
    most = max((t.functions for rows in by_distance.values() for t in rows), default=0)
    for distance in sorted(by_distance):
        for tally in by_distance[distance]:
            seen += tally.seen
            examples.add(tally.example)
            has_functions |= tally.functions >= MIN_FUNCTIONS
        if seen >= MIN_SEEN and (has_functions or len(examples) >= MIN_FUNCTIONS):
            return Least(distance, total, max(most, len(examples)))
    return None
