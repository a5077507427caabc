"""The moves: pure operations on a schedule, each with its pre-condition and its own error.

Every move names an instruction by its original index, so its text stays meaningful as others move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nostall.core.errors import IllegalMove
from nostall.core.space import Tags


class IllegalSlide(IllegalMove):
    """A slide would break a dependence, leave its block or cross a wall."""


class IllegalSwap(IllegalMove):
    """Two neighbours depend on each other, or their stalls would no longer suffice."""


class IllegalRestall(IllegalMove):
    """A stall would be too short for someone, or cannot be encoded."""


class IllegalYield(IllegalMove):
    """The yield flag cannot be encoded together with this stall or with reuse."""


class IllegalReuse(IllegalMove):
    """The operand cache would be stale, or cannot be encoded together with yield."""


class IllegalBoard(IllegalMove):
    """A scoreboard cannot be replaced: someone outside relies on it, or it is not free."""


@dataclass(frozen=True, slots=True)
class Slide:
    """Move an instruction by ``by`` positions; its control word travels with it.

    Legal inside its block when every dependence keeps its order; stalls that would be too short
    are raised, unless the move is ``exact`` (SIP's: two lines of text exchanged), which is then
    illegal.  Reuse flags of the words whose neighbour changed are cleared.
    """

    index: int
    by: int
    tags: Tags
    exact: bool = False
    error: ClassVar[type[IllegalMove]] = IllegalSlide

    def __str__(self) -> str:
        return f"slide #{self.index} by {self.by:+d}{' exactly' if self.exact else ''}"


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange an instruction with the next one; the stalls stay where they are.

    Legal when neither depends on the other.  Reuse flags of the words whose neighbour changed are
    cleared.
    """

    index: int
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSwap

    def __str__(self) -> str:
        return f"swap #{self.index} with the next"


@dataclass(frozen=True, slots=True)
class Restall:
    """Set the stall count to ``stall`` cycles (1..11, with yield 1..15).

    Legal when every dependence that spans it keeps its distance.
    """

    index: int
    stall: int
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalRestall

    def __str__(self) -> str:
        return f"stall #{self.index} = {self.stall}"


@dataclass(frozen=True, slots=True)
class Yield:
    """Flip the yield flag.  Legal when the word has no reuse flag and the stall allows it."""

    index: int
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalYield

    def __str__(self) -> str:
        return f"flip yield of #{self.index}"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Flip the reuse flag of operand slot 0, 1 or 2.

    Only flags that the compiler had set can be set again (which slots a word may flag is not
    documented).  Setting is legal when the next instruction has the same register in the same
    slot, this one does not overwrite it, and the word does not yield.
    """

    index: int
    slot: int
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalReuse

    def __str__(self) -> str:
        return f"flip reuse {'abc'[self.slot]} of #{self.index}"


@dataclass(frozen=True, slots=True)
class Board:
    """Announce a result (``write``) or the reading of sources by another scoreboard.

    Legal when exactly one instruction of the block waits for it; that one then waits for the new
    scoreboard, and no longer for the old one if nobody else needs that.
    """

    index: int
    write: bool
    board: int
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalBoard

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} scoreboard of #{self.index} = {self.board}"


ScheduleMove = Slide | Swap | Restall | Yield | Reuse | Board
