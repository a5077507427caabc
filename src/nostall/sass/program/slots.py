"""Operand slots (a, b, c) of the reuse cache: which general register an instruction has in each.

The slot of an operand depends on the instruction.  Its place in the instruction word depends on
the form of the instruction (bits 9 to 11): an immediate, constant or uniform operand takes bits 32
to 63, and the register that would be there is in bits 64 to 71.  The rules were found by comparing
nvdisasm's ``.reuse`` marks with the instruction words, for each opcode of sm_75 to sm_120.
"""

from __future__ import annotations

from nostall.sass.program.instruction import Instruction

SLOTS = "abc"
_REGISTERS_ONLY = 1
"""Form in which all operands are registers."""
_SLOT_B_AT_64 = (2, 3, 7)
"""Forms in which the register at bit 64 is in slot b; in all others it is in slot c."""
_THREE_SOURCES = (24, 32, 64)
_TWO_SOURCES_A_C = (24, None, 32)
_ONE_SOURCE = (None, 32, None)
_PLACES: dict[str, tuple[int | None, int | None, int | None]] = {
    **dict.fromkeys(
        ("FADD", "FADD2", "FHADD", "HADD2", "HSET2", "HSETP2", "DSETP"), _TWO_SOURCES_A_C
    ),
    **dict.fromkeys(("MOV", "IABS", "I2FP"), _ONE_SOURCE),
    "DADD": (24, None, 64),
}
"""Mnemonic -> lowest bit of the register number in each slot, if all operands are registers."""


def slot_register(instruction: Instruction, slot: int) -> int | None:
    """Number of the general register in operand slot 0, 1 or 2 (a, b, c), or None."""
    low = _register_field(instruction, slot)
    if low is None:
        return None
    register = instruction.payload >> low & 0xFF
    return register if register != 255 and register in instruction.uses else None


def _register_field(instruction: Instruction, slot: int) -> int | None:
    """Lowest bit of the 8-bit register number in the instruction word, or None."""
    form = instruction.payload >> 9 & 7
    if form == _REGISTERS_ONLY:
        return _PLACES.get(instruction.base, _THREE_SOURCES)[slot]
    if slot == 0:
        return 24
    slot_at_64 = 1 if form in _SLOT_B_AT_64 else 2
    return 64 if slot == slot_at_64 else None
