"""The 128-bit instruction word of Volta and later: which bits schedule and which bits compute.

The control word is declared as bit fields; everything else is payload and is never touched.
Bits and meanings: the nvdisasm grammar for sm_75 to sm_120, agreed by several public studies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

WORD_BYTES = 16
NO_SCOREBOARD = 7
SCOREBOARDS = range(6)


@dataclass(frozen=True, slots=True)
class BitField:
    """Bits ``low`` .. ``low + width - 1`` of the word."""

    low: int
    width: int

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.low

    def get(self, word: int) -> int:
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
    """One instruction's scheduling fields.

    ``stall``: cycles until the warp's next issue.  ``yields``: the next issue slot goes to another
    warp.  ``write_sb`` / ``read_sb``: scoreboard 0..5 released when the result is written / the
    sources are read (7: none).  ``wait``: bit mask of scoreboards that must be 0 before issue.
    ``reuse``: bit mask of operand slots a, b, c kept in the operand cache.
    """

    stall: int
    yields: bool
    write_sb: int = NO_SCOREBOARD
    read_sb: int = NO_SCOREBOARD
    wait: int = 0
    reuse: int = 0

    def with_(self, **fields: int | bool) -> Control:
        """A copy with some fields replaced."""
        return replace(self, **fields)  # type: ignore[arg-type]

    @property
    def waits(self) -> tuple[int, ...]:
        """The scoreboards waited for."""
        return tuple(sb for sb in SCOREBOARDS if self.wait >> sb & 1)

    @property
    def drains(self) -> bool:
        """The DRAIN form: stall 0 with the yield bit, which empties the pipeline."""
        return self.yields and self.stall == 0

    def __str__(self) -> str:
        waits = "".join(str(sb) if self.wait >> sb & 1 else "-" for sb in SCOREBOARDS)
        read, write = ("-" if sb == NO_SCOREBOARD else sb for sb in (self.read_sb, self.write_sb))
        return f"B{waits}:R{read}:W{write}:{'Y' if self.yields else '-'}:S{self.stall:02d}"


def decode(word: int) -> tuple[int, Control]:
    """Split a word into payload (control bits zero) and control."""
    payload = word & PAYLOAD_MASK
    return payload, _control(word ^ payload)


@lru_cache(1 << 14)  # a kernel has few different ones
def _control(bits: int) -> Control:
    return Control(
        stall=STALL.get(bits),
        yields=not NO_YIELD.get(bits),
        write_sb=WRITE_SB.get(bits),
        read_sb=READ_SB.get(bits),
        wait=WAIT.get(bits),
        reuse=REUSE.get(bits),
    )


def encode(payload: int, control: Control) -> int:
    """The inverse of :func:`decode`."""
    return (
        payload
        | control.stall << STALL.low
        | (not control.yields) << NO_YIELD.low
        | control.write_sb << WRITE_SB.low
        | control.read_sb << READ_SB.low
        | control.wait << WAIT.low
        | control.reuse << REUSE.low
    )


def illegal(control: Control, *, batch_field: bool = False) -> str | None:
    """Why a control word may not be encoded, or None when it may.

    ``batch_field`` marks opcodes whose bits 122..124 are the batch field and not reuse (DEPBAR).
    Grammar rules: without yield the issue field is 17..27, so a stall of 0 or 12..15 exists only
    with yield; reuse exists only without yield; scoreboard 6 does not exist.
    """
    if not control.yields and not 1 <= control.stall <= 11:
        return f"stall {control.stall} without yield (1..11 are allowed, 12..15 need yield)"
    if control.reuse and control.yields and not batch_field:
        return "reuse together with yield"
    for name, board in (("write", control.write_sb), ("read", control.read_sb)):
        if board == 6:
            return f"{name} scoreboard 6 (0..5 exist, 7 means none)"
    return None
