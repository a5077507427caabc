"""One instruction: what it computes (never changed) and how it is scheduled (may change)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.sass.binary.encoding import Control
from nostall.sass.program.opcodes import BATCH_FIELD, UNKNOWN, Does, Opcode, lookup

_GUARD = re.compile(r"^@(!?U?P[T0-9]\d*)\s+")
_DELIMITER = re.compile(r"[\[({\])},]")


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction of one function.

    ``index`` is its position in the original text (its identity); ``payload`` is the word without
    control bits.  ``defs`` and ``uses`` are register numbers with real operand widths; the
    subset ``guards`` comes from the predicate guard and ``address`` from bracketed operands.
    ``unmarked`` lists registers that the text names but the register columns do not know.
    ``glued`` instructions stay where they are and nothing crosses them.
    """

    index: int
    text: str
    payload: int
    control: Control
    opcode: str
    guard: str | None
    operands: tuple[str, ...]
    defs: tuple[int, ...]
    uses: tuple[int, ...]
    guards: tuple[int, ...]
    address: frozenset[int]
    unmarked: tuple[str, ...] = ()
    glued: bool = False

    @cached_property
    def base(self) -> str:
        """The mnemonic before the first dot."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def known(self) -> bool:
        """Whether the opcode has a row in the class table."""
        return lookup(self.base) is not None

    @cached_property
    def row(self) -> Opcode:
        return lookup(self.base) or UNKNOWN

    @cached_property
    def does(self) -> int:
        """Effects, refined by modifiers and operands."""
        does = self.row.does
        if "STRONG" in self.modifiers or "MMIO" in self.modifiers:
            does |= Does.FENCE
        if "`(" in self.text and any(operand.startswith("`(") for operand in self.operands):
            does |= Does.WALL  # an address relative to its own
        if "CLOCK" in self.text or "GLOBALTIMER" in self.text:
            does |= Does.WALL
        if self.glued:
            does |= Does.WALL
        return does

    @property
    def is_wall(self) -> bool:
        return bool(self.does & Does.WALL)

    @property
    def touches_memory(self) -> bool:
        return bool(self.does & (Does.READ_ANY | Does.WRITE_ANY | Does.FENCE | Does.WALL))

    @cached_property
    def is_guarded(self) -> bool:
        """Whether the instruction may not execute for some thread."""
        return self.guard is not None and self.guard not in ("PT", "UPT")

    @cached_property
    def never_executes(self) -> bool:
        return self.guard in ("!PT", "!UPT")

    @property
    def batch_field(self) -> bool:
        return self.base in BATCH_FIELD

    def with_control(self, control: Control) -> Instruction:
        return replace(self, control=control)


def parse_text(text: str) -> tuple[str | None, str, tuple[str, ...]]:
    """(guard, opcode, operands) of an nvdisasm line; commas inside brackets do not split."""
    guard = None
    found = _GUARD.match(text)
    if found:
        guard = found[1]
        text = text[found.end() :]
    opcode, _, rest = text.partition(" ")
    return guard, opcode, tuple(_split(rest))


def _split(rest: str) -> list[str]:
    if "[" not in rest and "(" not in rest and "{" not in rest:
        return [part.strip() for part in rest.split(",")] if rest.strip() else []
    parts: list[str] = []
    depth = start = 0
    for delimiter in _DELIMITER.finditer(rest):
        char = delimiter[0]
        if char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif depth == 0:
            parts.append(rest[start : delimiter.start()].strip())
            start = delimiter.end()
    parts.append(rest[start:].strip())
    return parts
