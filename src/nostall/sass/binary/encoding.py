"""The 128-bit instruction word of Volta and later GPUs: control word (scheduling) and payload.

The control word is declared as bit fields.  All other bits are the payload, which nostall never
changes.  Bits and meanings: the nvdisasm grammar for sm_75 to sm_120, on which several public
studies agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

WORD_BYTES = 16
"""Bytes of one instruction."""
NO_SCOREBOARD = 7
"""Value of a scoreboard field that sets no scoreboard."""
SCOREBOARDS = range(6)
"""Numbers of the scoreboards of a warp."""


@dataclass(frozen=True, slots=True)
class BitField:
    """Bits ``low`` to ``low + width - 1`` of the instruction word."""

    low: int
    width: int

    @property
    def mask(self) -> int:
        """The field's bits, set in an otherwise empty word."""
        return ((1 << self.width) - 1) << self.low

    def get(self, word: int) -> int:
        """The value of the field in ``word``."""
        return (word >> self.low) & ((1 << self.width) - 1)


STALL = BitField(105, 4)
NO_YIELD = BitField(109, 1)
WRITE_SB = BitField(110, 3)
READ_SB = BitField(113, 3)
WAIT = BitField(116, 6)
REUSE = BitField(122, 3)

FIELDS = (STALL, NO_YIELD, WRITE_SB, READ_SB, WAIT, REUSE)
CONTROL_MASK = sum(field.mask for field in FIELDS)
PAYLOAD_MASK = ((1 << 128) - 1) & ~CONTROL_MASK


@dataclass(frozen=True, slots=True)
class Control:
    """The control word of one instruction: its scheduling fields."""

    stall: int
    """Cycles until the next instruction of the warp may issue, 0 to 15."""
    yields: bool
    """Whether the scheduler gives the next issue slot to another warp."""
    write_sb: int = NO_SCOREBOARD
    """Write scoreboard, released when the result is written: 0 to 5, or 7 for none."""
    read_sb: int = NO_SCOREBOARD
    """Read scoreboard, released when the sources are read: 0 to 5, or 7 for none."""
    wait: int = 0
    """Wait mask: bit n set means that scoreboard n must be 0 before issue."""
    reuse: int = 0
    """Reuse flags: bits 0 to 2 keep operand slots a, b, c in the reuse cache."""

    def with_(self, **fields: int | bool) -> Control:
        """A copy with some fields replaced."""
        return replace(self, **fields)  # type: ignore[arg-type]

    @property
    def waits(self) -> tuple[int, ...]:
        """The scoreboards of the wait mask, in increasing order."""
        return tuple(sb for sb in SCOREBOARDS if self.wait >> sb & 1)

    @property
    def drains(self) -> bool:
        """Whether this is the DRAIN form (stall 0 with yield), which empties the pipeline."""
        return self.yields and self.stall == 0

    def __str__(self) -> str:
        waits = "".join(str(sb) if self.wait >> sb & 1 else "-" for sb in SCOREBOARDS)
        read, write = ("-" if sb == NO_SCOREBOARD else sb for sb in (self.read_sb, self.write_sb))
        return f"B{waits}:R{read}:W{write}:{'Y' if self.yields else '-'}:S{self.stall:02d}"


def decode(word: int) -> tuple[int, Control]:
    """Split an instruction word into its payload (control bits 0) and its control word."""
    payload = word & PAYLOAD_MASK
    return payload, _decode_control(word ^ payload)


@lru_cache(1 << 14)  # a kernel has few different control words
def _decode_control(bits: int) -> Control:
    return Control(
        stall=STALL.get(bits),
        yields=not NO_YIELD.get(bits),
        write_sb=WRITE_SB.get(bits),
        read_sb=READ_SB.get(bits),
        wait=WAIT.get(bits),
        reuse=REUSE.get(bits),
    )


def encode(payload: int, control: Control) -> int:
    """Combine a payload and a control word: the inverse of :func:`decode`."""
    return (
        payload
        | control.stall << STALL.low
        | (not control.yields) << NO_YIELD.low
        | control.write_sb << WRITE_SB.low
        | control.read_sb << READ_SB.low
        | control.wait << WAIT.low
        | control.reuse << REUSE.low
    )


def illegal_reason(control: Control, *, has_batch_field: bool = False) -> str | None:
    """Why the hardware does not accept a control word, or None if it is legal.

    ``has_batch_field``: bits 122 to 124 of this opcode are the batch field, not reuse flags.

    Rules of the nvdisasm grammar: without yield the issue field is 17 to 27, so stalls 0 and 12
    to 15 exist only with yield.  Reuse exists only without yield.  There is no scoreboard 6.
    """
    if not control.yields and not 1 <= control.stall <= 11:
        return f"stall {control.stall} without yield; 1 to 11 are allowed without yield"
    if control.reuse and control.yields and not has_batch_field:
        return "reuse flags together with yield; only one of them is allowed"
    for name, scoreboard in (("write", control.write_sb), ("read", control.read_sb)):
        if scoreboard == 6:
            return f"{name} scoreboard 6; 0 to 5 are allowed, 7 means none"
    return None
