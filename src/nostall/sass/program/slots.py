"""Which general register sits in which operand slot (a, b, c) of the operand cache.

The slot is a matter of the instruction, the place in the word a matter of its form (bits 9..11):
an immediate, constant or uniform operand takes bits 32..63, and the register that would be there
moves to bits 64..71.  Found by matching nvdisasm's ``.reuse`` marks with the words.
"""

from __future__ import annotations

from nostall.sass.program.instruction import Instruction

SLOTS = "abc"
_REGISTERS_ONLY = 1
_B_MOVED = (2, 3, 7)
_TWO_SOURCES_A_C = frozenset(("FADD", "HADD2", "DADD", "FHADD", "FADD2"))


def slot_register(instruction: Instruction, slot: int) -> int | None:
    """The register in operand slot 0, 1 or 2, or None."""
    low = _place(instruction, slot)
    if low is None:
        return None
    register = instruction.payload >> low & 0xFF
    return register if register != 255 and register in instruction.uses else None


def _place(instruction: Instruction, slot: int) -> int | None:
    """Lowest bit of the register number in the word."""
    if slot == 0:
        return 24
    form = instruction.payload >> 9 & 7
    if form == _REGISTERS_ONLY:
        if instruction.base in _TWO_SOURCES_A_C:
            return 32 if slot == 2 else None
        return 32 if slot == 1 else 64
    moved = 1 if form in _B_MOVED else 2
    return 64 if slot == moved else None
