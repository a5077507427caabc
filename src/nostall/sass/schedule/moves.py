"""The moves of a schedule: immutable records, each with its legality condition and its error.

A move names an instruction by its original index, which does not change when instructions move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nostall.core.errors import IllegalMove
from nostall.core.space import Tags


class IllegalSlide(IllegalMove):
    """A slide would break a dependence, leave its block or cross a wall."""


class IllegalSwap(IllegalMove):
    """Two neighbours depend on each other, or their stall counts would be too short."""


class IllegalSetStall(IllegalMove):
    """A stall count would be too short for a dependence, or cannot be encoded."""


class IllegalFlipYield(IllegalMove):
    """The yield flag cannot be encoded together with this stall count or with reuse."""


class IllegalFlipReuse(IllegalMove):
    """The operand cache would be stale, or reuse cannot be encoded together with yield."""


class IllegalSetScoreboard(IllegalMove):
    """A scoreboard cannot be replaced: code outside relies on it, or the new one is in use."""


@dataclass(frozen=True, slots=True)
class Slide:
    """Move an instruction by ``offset`` positions; its control word moves with it.

    Legal inside the block if each dependence keeps its order. Stall counts that are too short are
    raised, except in an ``exact`` slide: SIP's move, which exchanges two lines of text. An exact
    slide with too short a stall count is illegal. Reuse flags of instructions that get another
    successor are cleared.
    """

    index: int
    """Original index of the instruction."""
    offset: int
    """Number of positions; negative towards the start of the block."""
    tags: Tags
    exact: bool = False
    error: ClassVar[type[IllegalMove]] = IllegalSlide

    def __str__(self) -> str:
        return f"slide #{self.index} by {self.offset:+d}{' exactly' if self.exact else ''}"


@dataclass(frozen=True, slots=True)
class Swap:
    """Exchange an instruction with its successor; the stall counts keep their positions.

    Legal if neither depends on the other. Reuse flags of instructions that get another successor
    are cleared.
    """

    index: int
    """Original index of the instruction."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSwap

    def __str__(self) -> str:
        return f"swap #{self.index} with the next"


@dataclass(frozen=True, slots=True)
class SetStall:
    """Set the stall count of an instruction: 1 to 11 cycles, or 1 to 15 with the yield flag.

    Legal if each dependence across the instruction keeps its least distance.
    """

    index: int
    """Original index of the instruction."""
    stall: int
    """The new stall count in cycles."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSetStall

    def __str__(self) -> str:
        return f"stall #{self.index} = {self.stall}"


@dataclass(frozen=True, slots=True)
class FlipYield:
    """Flip the yield flag of an instruction.

    Legal if the control word has no reuse flag and the stall count allows the new flag.
    """

    index: int
    """Original index of the instruction."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalFlipYield

    def __str__(self) -> str:
        return f"flip yield of #{self.index}"


@dataclass(frozen=True, slots=True)
class FlipReuse:
    """Flip the reuse flag of one operand slot.

    A flag can be cleared always, and set if the compiler had set it (which slots an instruction
    may flag is not documented), the next instruction has the same register in the same slot, this
    one does not overwrite the register, and its yield flag is not set.
    """

    index: int
    """Original index of the instruction."""
    slot: int
    """Operand slot: 0 for a, 1 for b, 2 for c."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalFlipReuse

    def __str__(self) -> str:
        return f"flip reuse {'abc'[self.slot]} of #{self.index}"


@dataclass(frozen=True, slots=True)
class SetScoreboard:
    """Replace the scoreboard that covers an instruction's result, or the reading of its sources.

    Legal if exactly one instruction of the block waits for it. That instruction then waits for
    the new scoreboard, and stops waiting for the old one if no other operation needs this wait.
    """

    index: int
    """Original index of the instruction that sets the scoreboard."""
    write: bool
    """True for the write scoreboard (results), False for the read scoreboard (sources)."""
    scoreboard: int
    """Number of the new scoreboard, 0 to 5."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSetScoreboard

    def __str__(self) -> str:
        kind = "write" if self.write else "read"
        return f"{kind} scoreboard of #{self.index} = {self.scoreboard}"


ScheduleMove = Slide | Swap | SetStall | FlipYield | FlipReuse | SetScoreboard
