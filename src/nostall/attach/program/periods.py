"""Where a step of a program ends: at steps of its optimisers, or after which calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LEAST_CALLS = 6
"""Fewest calls before a period is looked for."""
REPEATS = 3
"""How often a period is seen before it counts."""
VARIED_CALLS = 32
"""Calls without a period of equal work, after which work that differs is accepted."""
MOST_CALLS = 2048
"""Calls without any period, after which none is looked for."""
GROWTH = 0.8
"""Share of calls that are larger than the one before, from which a generation loop is suspected."""
_PATIENCE = 64
"""Optimiser steps without the closing optimiser before another one is chosen."""


class Call(NamedTuple):
    """An outermost call that has ended."""

    unit: int
    """Which module, or which function that calls modules many times, was called."""
    work: Hashable
    """Modes and shapes; equal for calls that did the same work."""
    size: int
    """Elements of the tensors among the arguments."""


class Period(NamedTuple):
    """Calls that repeat."""

    start: int
    """Index of the first call of the first period."""
    units: tuple[int, ...]
    """What is called in a period."""
    is_varied: bool
    """Whether the work of its calls differs from period to period."""


def find_period(calls: Sequence[Call]) -> Period | None:
    """The shortest period of the last calls, which explains at least half of all.

    Calls of equal work are looked for first; only after :data:`VARIED_CALLS` those of equal units.
    """
    if len(calls) < LEAST_CALLS:
        return None
    if (found := _repeated(list(calls))) is not None:
        start, length = found
        return Period(start, tuple(c.unit for c in calls[start : start + length]), False)
    if len(calls) < VARIED_CALLS or grows(calls):
        return None
    units = [call.unit for call in calls]
    if (found := _repeated(units)) is not None:
        start, length = found
        return Period(start, tuple(units[start : start + length]), True)
    return None


def grows(calls: Sequence[Call]) -> bool:
    """Whether most calls have larger arguments than the one before, as in a generation loop."""
    pairs = [(a.size, b.size) for a, b in pairwise(calls) if a.unit == b.unit]
    return bool(pairs) and sum(a < b for a, b in pairs) >= GROWTH * len(pairs)


def _repeated(found: Sequence[Hashable]) -> tuple[int, int] | None:
    """Start and length of the shortest period at the end of a sequence; None without one."""
    count = len(found)
    for length in range(1, count // REPEATS + 1):
        first = count - 1
        while first >= length and found[first] == found[first - length]:
            first -= 1
        start = first - length + 1
        if count - start >= REPEATS * length and 2 * (count - start) >= count:
            return start, length
    return None


class CallBorders:
    """Notes outermost calls, finds their period, and tells which of them end a step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.period: Period | None = None
        self._position, self._next = 0, LEAST_CALLS

    def note(self, call: Call) -> None:
        """Note a call while no period is known."""
        self.calls.append(call)

    def is_due(self) -> bool:
        """Whether to look for a period; seldom, because a look takes time."""
        if len(self.calls) < self._next:
            return False
        self._next = len(self.calls) + max(1, len(self.calls) // 8)
        return True

    def postpone(self) -> None:
        """Look again only after twice as many calls."""
        self._next = 2 * len(self.calls)

    def look(self, accept: Callable[[Period], bool]) -> bool:
        """Look for a period that ``accept`` takes; whether there is one."""
        found = find_period(self.calls)
        if found is None or not accept(found):
            return False
        self.period = found
        self._position = (len(self.calls) - found.start) % len(found.units)
        self.calls = []
        return True

    def ends(self, unit: int) -> bool | None:
        """Whether a step ends with a call of ``unit``; None if another one was to come."""
        assert self.period is not None
        units = self.period.units
        if units[self._position] != unit:
            self._position = 0
            return None
        self._position = (self._position + 1) % len(units)
        return self._position == 0


class Borders:
    """Tells which optimiser step ends a step of the program.

    A program with several optimisers steps them in periods (a GAN's critic five times, its
    generator once; or one optimiser a parameter).  The one with the fewest steps closes a period;
    of equal ones, the one that was seen last.
    """

    def __init__(self) -> None:
        self.closing: int | None = None
        """The optimiser whose step ends a period."""
        self.changes = 0
        """How many times another optimiser, or another kind of event, began to end periods."""
        self.change = "other optimisers step"
        """What the last change was."""
        self.found = ""
        """Description of a step that no optimiser ends."""
        self.modules: list[Any] = []
        """The modules whose calls end the steps; empty where others do."""
        self._counts: dict[int, int] = {}
        self._silent = 0

    @property
    def period(self) -> tuple[int, ...]:
        """Steps of each optimiser in a period, rounded."""
        closed = self._counts.get(self.closing or 0, 0)
        counts = (round(count / closed) for count in self._counts.values() if closed)
        return tuple(count for count in counts if count)

    def restart(self, found: str, modules: list[Any]) -> None:
        """Another kind of event ends the steps."""
        self.closing, self._counts, self._silent = None, {}, 0
        self.found, self.modules = found, modules
        self.changes += 1

    def note(self, optimizer: int) -> bool:
        """Note a step of an optimiser; whether a step of the program ends with it."""
        if optimizer not in self._counts:
            self._choose(optimizer, dict.fromkeys([*self._counts, optimizer], 0))
        self._counts[optimizer] += 1
        self._silent = 0 if optimizer == self.closing else self._silent + 1
        if optimizer != self.closing:
            mine, closing = self._counts[optimizer], self._counts[self.closing or 0]
            # The margin: periods of equal counts are not complete at each step.
            if 1.5 * mine + 1 < closing:
                self._choose(optimizer, self._counts)
            elif self._silent > max(_PATIENCE, 4 * len(self._counts)):
                self._choose(optimizer, {optimizer: 1})
        return optimizer == self.closing

    def _choose(self, optimizer: int, counts: dict[int, int]) -> None:
        self.closing, self._counts, self._silent = optimizer, counts, 0
        self.changes += 1
