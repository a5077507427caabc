"""What pairs without witnesses prove about an instruction, if they keep their order."""

from __future__ import annotations

from dataclasses import dataclass, field

Provers = frozenset[int]
"""Indices of later instructions whose order with an earlier one proves it done."""


@dataclass(slots=True)
class AssumedProof:
    """What proves a result written or sources read if pairs without witnesses keep their order."""

    covering: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(later instruction, its scoreboard)."""
    provers: Provers | None = None
    """The later instructions whose scoreboards were waited for; None if none was."""

    def cover(self, later: int, scoreboards: int) -> None:
        """Add the scoreboards (bit mask) of a later instruction."""
        self.covering |= {(later, n) for n in range(6) if scoreboards >> n & 1}

    def wait(self, scoreboards: int) -> None:
        """Note a wait for scoreboards (bit mask)."""
        found = self.waited_for(scoreboards)
        if found:
            self.provers = found | (self.provers or frozenset())

    def waited_for(self, scoreboards: int) -> Provers:
        """The covering instructions for which a wait for scoreboards (bit mask) waits."""
        return frozenset(later for later, n in self.covering if scoreboards >> n & 1)

    def scoreboards(self) -> int:
        """Bit mask of the covering scoreboards."""
        mask = 0
        for _, number in self.covering:
            mask |= 1 << number
        return mask
