"""Lines of a synthesised kernel: a word with its control fields, labels, and their assembly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.sass.distances.microkernels.registers import NUMBERS
from benchmarks.sass.distances.microkernels.words import branch, word
from nostall.sass.binary.encoding import NO_SCOREBOARD, WORD_BYTES, Control, encode
from nostall.sass.program.opcodes import lookup

SM = 90
"""Architecture of the experiments."""
SETTLED = 15
"""Stall of every line outside the tested pair: no result but that of a matrix unit takes longer."""
SETTLED_SB = 0
"""Scoreboard of every variable-latency line outside the tested pair; the next line waits for it."""
_STORES = ("STG", "STS")


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction with its control fields."""

    payload: int
    stall: int = SETTLED
    yields: bool = True
    wait: int = 0
    write_sb: int = NO_SCOREBOARD
    read_sb: int = NO_SCOREBOARD
    reuse: int = 0
    target: str = ""
    """Label of a branch."""
    guard: str = ""
    """Guard of a branch."""

    @property
    def control(self) -> Control:
        """The control word."""
        return Control(self.stall, self.yields, self.write_sb, self.read_sb, self.wait, self.reuse)

    def encoded(self, payload: int) -> int:
        """The instruction word with ``payload``."""
        return encode(payload, self.control)


@dataclass(frozen=True, slots=True)
class Label:
    """A place that branches name."""

    name: str


@dataclass(frozen=True, slots=True)
class Align:
    """NOPs up to the next position that is ``offset`` modulo 8 words (one line of the cache)."""

    offset: int


Item = Line | Label | Align


def number(name: str) -> int:
    """The number of a register by its name, or an immediate such as ``#16``."""
    return int(name[1:]) if name.startswith("#") else NUMBERS[name]


def base(form: str) -> str:
    """The mnemonic of a form."""
    return form.partition(" ")[0].partition(".")[0]


def scoreboards(form: str, scoreboard: int) -> dict[str, int]:
    """The scoreboard fields of a form: none for fixed latency, ``read_sb`` for stores."""
    row = lookup(base(form))
    if row is None or row.has_fixed_latency(SM):
        return {}
    return {"read_sb" if base(form) in _STORES else "write_sb": scoreboard}


def line(form: str, guard: str = "", **fields: int) -> Line:
    """A settled line: stall 15, and a scoreboard if the latency is variable."""
    return Line(word(form, guard, **fields), **scoreboards(form, SETTLED_SB))


def jump(target: str, guard: str = "") -> Line:
    """A branch to a label."""
    return Line(0, target=target, guard=guard)


def settled(lines: Iterable[Item], waits: int = 0) -> list[Item]:
    """Lines, each of which waits for the scoreboard of the one before.

    ``waits``: further scoreboards (bit mask) that the first line waits for.
    """
    result: list[Item] = []
    pending = waits
    for item in lines:
        if isinstance(item, Line):
            sets = SETTLED_SB in (item.write_sb, item.read_sb)
            if pending:
                item = replace(item, wait=item.wait | pending)
            pending = 1 << SETTLED_SB if sets else 0
        result.append(item)
    if pending:
        result.append(Line(word("NOP"), wait=pending))
    return result


def nops(count: int) -> list[Item]:
    """NOPs that last 15 cycles each."""
    return [Line(word("NOP"))] * count


def assemble(items: Sequence[Item]) -> tuple[bytes, list[int]]:
    """The machine code of ``items``, and the position of each item in words."""
    positions: list[int] = []
    labels: dict[str, int] = {}
    at = 0
    for item in items:
        if isinstance(item, Align):
            at += (item.offset - at) % 8
        positions.append(at)
        if isinstance(item, Label):
            labels[item.name] = at
        at += isinstance(item, Line)
    code = bytearray(_NOP * at)
    for item, position in zip(items, positions, strict=True):
        if isinstance(item, Line):
            payload = item.payload
            if item.target:
                payload = branch(labels[item.target] - position - 1, item.guard)
            start = position * WORD_BYTES
            code[start : start + WORD_BYTES] = item.encoded(payload).to_bytes(WORD_BYTES, "little")
    return bytes(code), positions


_NOP = Line(word("NOP"), stall=1).encoded(word("NOP")).to_bytes(WORD_BYTES, "little")
