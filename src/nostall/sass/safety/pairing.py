"""Names of instruction pairs: the keys of the latency tables.

A name has two sides, ``producer|consumer``.  An *exact* name has everything that can matter for
the timing of a pair: the opcodes with their modifiers, the part of the result, and the operand
that takes it.  The same unit may forward some operands early and read others late.  Two *coarse*
names serve if compiler output had too few occurrences of the exact one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from nostall.sass.program import registers
from nostall.sass.program.defuse import named_registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

HazardKind = Literal["RAW", "WAW", "WAR"]
"""Read after write, write after write, write after read."""

_FORM_MODIFIERS = frozenset(("WIDE", "HI", "64", "F64", "X", "SHL"))
"""Modifiers that the first coarse name keeps."""

_COMPARISONS = "EQ NE LT LE GT GE EQU NEU LTU LEU GTU GEU NUM NAN AND OR XOR U32 S32 LUT"
_ROUNDINGS = "FTZ RN RZ RM RP TRUNC FLOOR CEIL CLAMP RELU SAT"
_CACHE_POLICIES = "E CONSTANT EF EL LU NA SYS GPU CTA STRONG BYP LTC128B"
_MODIFIERS_WITHOUT_TIMING = frozenset(f"{_COMPARISONS} {_ROUNDINGS} {_CACHE_POLICIES}".split())
"""Modifiers that do not change the timing of a unit."""

_WIDE = frozenset(("WIDE", "64", "F64", "128"))


def signature(instruction: Instruction) -> str:
    """The opcode with only those modifiers that its timing may depend on."""
    return _signature(instruction.opcode)


@lru_cache(1 << 14)
def _signature(opcode: str) -> str:
    base, *modifiers = opcode.split(".")
    return ".".join((base, *(m for m in modifiers if m not in _MODIFIERS_WITHOUT_TIMING)))


def exact_names(
    first: Instruction, second: Instruction, register: int, kind: HazardKind
) -> list[str]:
    """The exact names of a pair: one for each operand of ``second`` that holds ``register``."""
    if kind == "WAR":
        return [f"{signature(first)}>{_register_file(register)}|{signature(second)}.write"]
    producer = f"{signature(first)}>{_register_file(register)}{_result_part(first, register)}"
    if kind == "WAW":
        return [f"{producer}|{signature(second)}.write"]
    return [f"{producer}|{signature(second)}.{place}" for place in _places(second, register)]


def coarse_names(
    first: Instruction, second: Instruction, register: int, kind: HazardKind
) -> tuple[str, str]:
    """Two coarse names: (form of the producer | role in the consumer, pipe of the producer | role).

    The role is the pipe of the consumer with the kind of operand, see :func:`_consumer_role`.
    """
    role = _consumer_role(second, register, kind)
    return f"{producer_form(first, register)}|{role}", f"{producer_class(first, register)}|{role}"


def pair_key(
    first: Instruction, second: Instruction, register: int, kind: HazardKind
) -> tuple[object, ...]:
    """A key that is equal for pairs with equal exact and coarse names; cheaper than the names."""
    if kind == "WAR":
        return kind, first.opcode, second.opcode, _REGISTER_FILES[register]
    part = _result_part(first, register)
    if kind == "WAW":
        return kind, first.opcode, second.opcode, _REGISTER_FILES[register], part
    places = tuple(_places(second, register))
    role = _consumer_role(second, register, kind)
    return kind, first.opcode, second.opcode, _REGISTER_FILES[register], part, places, role


def is_upper_addend(first: Instruction, second: Instruction, register: int) -> bool:
    """Whether ``first`` writes one word, which ``IMAD.WIDE`` reads as its addend's upper word only.

    The addend is operand 3, or 4 after a predicate that gets the carry.
    """
    if second.base != "IMAD" or "WIDE" not in second.modifiers or _register_file(register) != "R":
        return False
    return not _result_part(first, register) and _places(second, register) in (["3+1"], ["4+1"])


def producer_form(instruction: Instruction, register: int) -> str:
    """The opcode of a producer with few modifiers and the register file, such as ``FADD>R``."""
    return f"{_form(instruction)}>{_register_file(register)}"


def producer_class(instruction: Instruction, register: int) -> str:
    """The class of a producer: its pipe and the register file, such as ``fma>R``."""
    return f"{instruction.pipe}>{_register_file(register)}"


def producer_classes(instruction: Instruction, registers: Sequence[int]) -> set[str]:
    """The classes of a producer for several registers."""
    return {f"{instruction.pipe}>{file}" for file in {_REGISTER_FILES[r] for r in registers}}


def pipe_pair(first: Instruction, second: Instruction) -> str:
    """The name of two neighbours in a block: their pipes."""
    return f"{first.pipe}|{second.pipe}"


def barrier_pair(barrier: Instruction, instruction: Instruction) -> tuple[str, str]:
    """(exact, coarse) name of a scheduling barrier and an instruction near it."""
    return f"{barrier.base}|{instruction.base}", f"{barrier.base}|{instruction.pipe}"


_REGISTER_FILES = tuple(
    ("U" if registers.is_uniform(r) else "") + ("P" if registers.is_predicate(r) else "R")
    for r in range(registers.COUNT)
)
"""Register number -> R, UR, P or UP."""


def _register_file(register: int) -> str:
    return _REGISTER_FILES[register]


def _form(instruction: Instruction) -> str:
    """The opcode as the first coarse name has it."""
    if instruction.pipe is Pipe.MMA:
        return instruction.opcode
    return ".".join((instruction.base, *sorted(instruction.modifiers & _FORM_MODIFIERS)))


def _result_part(instruction: Instruction, register: int) -> str:
    """Which register of a wide result, or which predicate operand, ``register`` is."""
    if registers.is_predicate(register):
        name = registers.name(register)
        number = next((k for k, text in enumerate(instruction.operands) if text == name), 0)
        return f"@{number}"
    same_file = [r for r in instruction.defs if _register_file(r) == _register_file(register)]
    return str(register - min(same_file)) if len(same_file) > 1 else ""


def _consumer_role(instruction: Instruction, register: int, kind: HazardKind) -> str:
    """Role of ``register`` in ``instruction``: guard, address, accumulator, data or result."""
    pipe = instruction.pipe
    if kind != "RAW":
        return f"{pipe}:write"
    if register in instruction.guard_registers:
        return "guard"
    if register in instruction.address_registers:
        return f"{pipe}:address"
    if instruction.pipe is Pipe.MMA and _is_accumulator(instruction, register):
        return f"{instruction.base}:accumulator"
    return f"{pipe}:data"


def _is_accumulator(instruction: Instruction, register: int) -> bool:
    """Whether ``register`` is in the fourth operand of a matrix instruction."""
    if len(instruction.operands) < 4 or not instruction.operands[3].startswith("R"):
        return False
    digits = "".join(c for c in instruction.operands[3][1:].split(".")[0] if c.isdigit())
    return bool(digits) and int(digits) <= register < int(digits) + len(instruction.defs)


def _places(instruction: Instruction, register: int) -> list[str]:
    """Where an instruction takes ``register``: the guard, or operand numbers and words in them.

    ``2`` is the first word of operand 2, ``2+1`` its second word, ``?`` an unknown place.
    """
    places = ["guard"] if register in instruction.guard_registers else []
    candidates = [
        (register - base, operand)
        for operand, base in _operand_bases(instruction.operands)
        if base <= register and _register_file(base) == _register_file(register)
    ]
    if register in instruction.defs or (candidates and instruction.defs and candidates[0][1] == 0):
        candidates = candidates[1:] or candidates  # the first operand that names it is the result
    reach = 1 if instruction.modifiers & _WIDE or instruction.base[0] == "D" else 0
    if instruction.pipe is Pipe.MMA or "128" in instruction.modifiers:
        reach = 3
    nearest = min((word for word, _ in candidates), default=0)
    for word, operand in candidates:
        if word == nearest or word <= reach:
            places.append(f"{operand}+{word}" if word else str(operand))
    return list(dict.fromkeys(places)) or ["?"]


@lru_cache(1 << 14)
def _operand_bases(operands: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(operand number, register) of each register that the operands name."""
    return tuple(
        (number, register)
        for number, text in enumerate(operands)
        for register in named_registers(text)
    )
