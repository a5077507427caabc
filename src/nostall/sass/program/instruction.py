"""One instruction: its payload (never changed) and its control word (may change)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.sass.binary.encoding import Control
from nostall.sass.program.opcodes import (
    BATCH_FIELD_OPCODES,
    FORMS,
    UNKNOWN,
    Effect,
    OpcodeClass,
    Pipe,
    lookup,
)

_GUARD = re.compile(r"^@(!?U?P[T0-9]\d*)\s+")
_DELIMITER = re.compile(r"[\[({\])},]")


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction of one function."""

    index: int
    """Position in the original function.  It identifies the instruction when it moves."""
    text: str
    """Assembly text as nvdisasm prints it."""
    payload: int
    """The instruction word with its control bits 0."""
    control: Control
    opcode: str
    """Mnemonic with modifiers, such as ``LDG.E.128``."""
    guard: str | None
    """Guard predicate, such as ``!P0``; None if there is none."""
    operands: tuple[str, ...]
    defs: tuple[int, ...]
    """Numbers of the registers that are written, all registers of wide operands included."""
    uses: tuple[int, ...]
    """Numbers of the registers that are read, guard and wide operands included."""
    guard_registers: tuple[int, ...]
    """The part of ``uses`` that the guard predicate reads."""
    address_registers: frozenset[int]
    """The part of ``uses`` in bracketed operands."""
    unmarked: tuple[str, ...] = ()
    """Registers that the text names and that ``defs`` and ``uses`` lack."""
    acts_as_barrier: bool = False
    """Whether the instruction is a scheduling barrier although its opcode is not."""

    @cached_property
    def base(self) -> str:
        """The mnemonic before the first dot."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        """The parts of the mnemonic after the first dot."""
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def is_known_opcode(self) -> bool:
        """Whether the opcode has a row in the opcode table."""
        return lookup(self.base) is not None

    @cached_property
    def opcode_class(self) -> OpcodeClass:
        """The row of the opcode or its form in the opcode table, or ``UNKNOWN``."""
        row = lookup(self.base) or UNKNOWN
        for (base, modifier), form in FORMS.items():
            if base == self.base and modifier in self.modifiers:
                row = form
        return row

    @cached_property
    def pipe(self) -> Pipe:
        """The pipe that executes the instruction."""
        return self.opcode_class.pipe

    def has_fixed_latency(self, sm: int) -> bool:
        """Whether the result arrives after a fixed number of cycles, without a scoreboard."""
        return self.opcode_class.has_fixed_latency(sm)

    @cached_property
    def effects(self) -> int:
        """Effects of the opcode, extended by those of modifiers and operands (see ``Effect``)."""
        effects = self.opcode_class.effects
        if "STRONG" in self.modifiers or "MMIO" in self.modifiers:
            effects |= Effect.FENCE
        if "`(" in self.text and any(operand.startswith("`(") for operand in self.operands):
            effects |= Effect.BARRIER  # the operand is relative to the instruction's own address
        if "CLOCK" in self.text or "GLOBALTIMER" in self.text:
            effects |= Effect.BARRIER
        if self.acts_as_barrier:
            effects |= Effect.BARRIER
        return effects

    @cached_property
    def is_barrier(self) -> bool:
        """Whether the instruction is a scheduling barrier: nothing may move across it."""
        return bool(self.effects & Effect.BARRIER)

    @cached_property
    def accesses_memory(self) -> bool:
        """Whether the instruction reads, writes or orders memory that a kernel can write."""
        return bool(self.effects & Effect.ACCESS)

    @cached_property
    def is_guarded(self) -> bool:
        """Whether some thread may not execute the instruction."""
        return self.guard is not None and self.guard not in ("PT", "UPT")

    @cached_property
    def never_executes(self) -> bool:
        """Whether the guard is always false."""
        return self.guard in ("!PT", "!UPT")

    @property
    def has_batch_field(self) -> bool:
        """Whether bits 122 to 124 of the word are the batch field and not reuse flags."""
        return self.base in BATCH_FIELD_OPCODES

    def with_control(self, control: Control) -> Instruction:
        """A copy with another control word."""
        return replace(self, control=control)


def parse_text(text: str) -> tuple[str | None, str, tuple[str, ...]]:
    """Split an nvdisasm line into (guard, opcode, operands); brackets keep operands together."""
    guard = None
    match = _GUARD.match(text)
    if match:
        guard = match[1]
        text = text[match.end() :]
    opcode, _, rest = text.partition(" ")
    return guard, opcode, tuple(_split_operands(rest))


def _split_operands(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if "[" not in text and "(" not in text and "{" not in text:
        return [part.strip() for part in text.split(",")] if text.strip() else []
    operands: list[str] = []
    depth = start = 0
    for delimiter in _DELIMITER.finditer(text):
        char = delimiter[0]
        if char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif depth == 0:
            operands.append(text[start : delimiter.start()].strip())
            start = delimiter.end()
    operands.append(text[start:].strip())
    return operands
