"""Register numbers: one integer for each register that can carry a dependence.

General registers have numbers 0 to 254, uniform registers 256 to 382, predicates 384 to 390 and
uniform predicates 392 to 398.  RZ, URZ, PT and UPT are constants and have no number.

Operand slots (a, b, c) of the reuse cache: which general register an instruction has in each.

The slot of an operand depends on the instruction.  Its place in the instruction word depends on
the form of the instruction (bits 9 to 11): an immediate, constant or uniform operand takes bits 32
to 63, and the register that would be there is in bits 64 to 71.  The rules were found by comparing
nvdisasm's ``.reuse`` marks with the instruction words, for each opcode of sm_75 to sm_120.
"""

from __future__ import annotations

from nostall.sass.program.instruction import Instruction

COUNT = 400
"""All register numbers are below this."""
_BASE = {"R": 0, "UR": 256, "P": 384, "UP": 392}
_SIZE = {"R": 255, "UR": 127, "P": 7, "UP": 7}
ALL = tuple(_BASE[file] + index for file, size in _SIZE.items() for index in range(size))
"""All register numbers."""


def number(file: str, index: int) -> int:
    """The number of register ``index`` of ``file`` (R, UR, P or UP)."""
    if not 0 <= index < _SIZE[file]:
        raise ValueError(
            f"register {file}{index} does not exist; {file} has indices 0 to {_SIZE[file] - 1}"
        )
    return _BASE[file] + index


def name(register: int) -> str:
    """The name of a register number in nvdisasm's spelling: the inverse of :func:`number`."""
    file = "UP" if register >= 392 else "P" if register >= 384 else "UR" if register >= 256 else "R"
    return f"{file}{register - _BASE[file]}"


def is_uniform(register: int) -> bool:
    """Whether the number is of a uniform register or a uniform predicate."""
    return 256 <= register < 384 or register >= 392


def is_predicate(register: int) -> bool:
    """Whether the number is of a predicate or a uniform predicate."""
    return register >= 384


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
