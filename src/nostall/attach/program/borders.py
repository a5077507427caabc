"""Where a step of a program ends, found from the steps of its optimisers; what else ends them."""

from __future__ import annotations

from typing import Any

_PATIENCE = 64
"""Optimiser steps without the closing optimiser before another one is chosen."""


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
        """How often another optimiser became the closing one, or another kind of event."""
        self.change = "other optimisers step"
        """What the last change was."""
        self.found = ""
        """What a step is, in words, where no optimiser ends it."""
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
