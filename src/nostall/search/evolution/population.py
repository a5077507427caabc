"""Population of the best states, each with all its measured values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Generic

import numpy as np

from nostall.core import Space
from nostall.core.space import M, S

_RANK_FACTOR = 0.8
"""Probability of a rank as a parent, relative to the rank before it."""


@dataclass(frozen=True, slots=True)
class Member(Generic[S]):
    """A state with its values.

    The first value selected the state among many, so it is lucky more often than not.  It counts
    only until there are others.
    """

    state: S
    key: bytes
    values: tuple[float, ...]
    """One value for each measurement, in order."""

    @property
    def value(self) -> float:
        """Median of the values after the first, or the only value; infinity after a failure."""
        if math.inf in self.values:
            return math.inf
        return median(self.values[1:] or self.values)

    def measured(self, value: float) -> Member[S]:
        """The member after one more measurement."""
        return replace(self, values=(*self.values, value))


@dataclass(frozen=True, slots=True)
class Population(Generic[S]):
    """At most ``size`` members, the smallest value first; immutable."""

    size: int
    members: tuple[Member[S], ...] = ()

    def __iter__(self) -> Iterator[Member[S]]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def threshold(self) -> float:
        """Value below which a state enters; infinity while there is room."""
        return self.members[-1].value if len(self.members) >= self.size else math.inf

    def find(self, key: bytes) -> Member[S] | None:
        """The member with this key."""
        return next((member for member in self.members if member.key == key), None)

    def insert(self, member: Member[S]) -> Population[S]:
        """The population with a new member, or with a new version of a known one.

        A member whose value is not finite leaves.
        """
        others = [m for m in self.members if m.key != member.key]
        members = [m for m in (*others, member) if math.isfinite(m.value)]
        members.sort(key=lambda m: (m.value, m.key))
        return replace(self, members=tuple(members[: self.size]))

    def draw(self, rng: np.random.Generator) -> Member[S]:
        """A parent: the lower its value, the more often it is drawn."""
        weights = _RANK_FACTOR ** np.arange(len(self.members))
        return self.members[int(rng.choice(len(self.members), p=weights / weights.sum()))]

    def dump(self, space: Space[S, M]) -> list[dict[str, Any]]:
        """The members as JSON."""
        return [{"state": space.dump(m.state), "values": list(m.values)} for m in self.members]

    @classmethod
    def load(cls, size: int, entries: list[dict[str, Any]], space: Space[S, M]) -> Population[S]:
        """A population from the JSON of :meth:`dump`."""
        population = cls(size)
        for entry in entries:
            state = space.load(entry["state"])
            population = population.insert(
                Member(state, space.key(state), tuple(map(float, entry["values"])))
            )
        return population
