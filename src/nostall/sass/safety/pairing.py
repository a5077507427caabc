"""What a pair of instructions is called in the tables of latencies.

A name has two sides, ``producer|consumer``.  An *exact* name keeps everything of an opcode that
can matter for its timing, which part of a result is meant and which operand takes it: the same
unit forwards some operands early and reads others late.  Two coarser names serve where too little
was seen of the exact one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from nostall.sass.program import registers
from nostall.sass.program.defuse import named
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

Kind = Literal["RAW", "WAW", "WAR"]

_WIDTHS = frozenset(("WIDE", "HI", "64", "F64", "X", "SHL"))

_COMPARISONS = "EQ NE LT LE GT GE EQU NEU LTU LEU GTU GEU NUM NAN AND OR XOR U32 S32 LUT"
_ROUNDINGS = "FTZ RN RZ RM RP TRUNC FLOOR CEIL CLAMP RELU SAT"
_POLICIES = "E CONSTANT EF EL LU NA SYS GPU CTA STRONG BYP LTC128B"
_WITHOUT_TIMING = frozenset(f"{_COMPARISONS} {_ROUNDINGS} {_POLICIES}".split())
"""Modifiers that do not change what a unit does when."""

_WIDE = frozenset(("WIDE", "64", "F64", "128"))


def signature(instruction: Instruction) -> str:
    """The opcode with the modifiers that its timing may depend on."""
    return _signature(instruction.opcode)


@lru_cache(1 << 14)
def _signature(opcode: str) -> str:
    base, *modifiers = opcode.split(".")
    return ".".join((base, *(m for m in modifiers if m not in _WITHOUT_TIMING)))


def exact(first: Instruction, second: Instruction, register: int, kind: Kind) -> list[str]:
    """The exact names of a pair: one per operand of ``second`` that holds ``register``."""
    if kind == "WAR":
        return [f"{signature(first)}>{_file(register)}|{signature(second)}.write"]
    made = f"{signature(first)}>{_file(register)}{_part(first, register)}"
    if kind == "WAW":
        return [f"{made}|{signature(second)}.write"]
    return [f"{made}|{signature(second)}.{place}" for place in _places(second, register)]


def coarse(first: Instruction, second: Instruction, register: int, kind: Kind) -> tuple[str, str]:
    """Two wider names: form of the producer and pipe of the consumer; pipe and pipe."""
    slot = _slot(second, register, kind)
    return f"{_form(first)}>{_file(register)}|{slot}", f"{group(first, register)}|{slot}"


def pair_key(
    first: Instruction, second: Instruction, register: int, kind: Kind
) -> tuple[object, ...]:
    """Equal for pairs whose names, exact and coarse, are all equal; cheaper than the names."""
    if kind == "WAR":
        return kind, first.opcode, second.opcode, _FILES[register]
    part = _part(first, register)
    if kind == "WAW":
        return kind, first.opcode, second.opcode, _FILES[register], part
    places = tuple(_places(second, register))
    slot = _slot(second, register, kind)
    return kind, first.opcode, second.opcode, _FILES[register], part, places, slot


def group(instruction: Instruction, register: int) -> str:
    """The class of a producer: its pipe and the file of the register."""
    return f"{instruction.row.pipe}>{_file(register)}"


def neighbours(first: Instruction, second: Instruction) -> str:
    """The name of two neighbours in a block: their pipes."""
    return f"{first.row.pipe}|{second.row.pipe}"


def wall_pair(wall: Instruction, instruction: Instruction) -> tuple[str, str]:
    """(exact, coarse) name of an instruction near a wall."""
    return f"{wall.base}|{instruction.base}", f"{wall.base}|{instruction.row.pipe}"


_FILES = tuple(
    ("U" if registers.is_uniform(r) else "") + ("P" if registers.is_predicate(r) else "R")
    for r in range(registers.COUNT)
)


def _file(register: int) -> str:
    return _FILES[register]


def _form(instruction: Instruction) -> str:
    if instruction.row.pipe is Pipe.MMA:
        return instruction.opcode
    return ".".join((instruction.base, *sorted(instruction.modifiers & _WIDTHS)))


def _part(instruction: Instruction, register: int) -> str:
    """Which register of the result, or which predicate operand."""
    if registers.is_predicate(register):
        name = registers.name(register)
        at = next((k for k, text in enumerate(instruction.operands) if text == name), 0)
        return f"@{at}"
    same = [r for r in instruction.defs if _file(r) == _file(register)]
    return str(register - min(same)) if len(same) > 1 else ""


def _slot(instruction: Instruction, register: int, kind: Kind) -> str:
    pipe = instruction.row.pipe
    if kind != "RAW":
        return f"{pipe}:write"
    if register in instruction.guards:
        return "guard"
    if register in instruction.address:
        return f"{pipe}:address"
    if instruction.row.pipe is Pipe.MMA and _is_accumulator(instruction, register):
        return f"{instruction.base}:accumulator"
    return f"{pipe}:data"


def _is_accumulator(instruction: Instruction, register: int) -> bool:
    if len(instruction.operands) < 4 or not instruction.operands[3].startswith("R"):
        return False
    digits = "".join(c for c in instruction.operands[3][1:].split(".")[0] if c.isdigit())
    return bool(digits) and int(digits) <= register < int(digits) + len(instruction.defs)


def _places(instruction: Instruction, register: int) -> list[str]:
    """Where an instruction takes ``register``: guard, or operand number and word in it."""
    places = ["guard"] if register in instruction.guards else []
    found = [
        (register - base, at)
        for at, base in _bases(instruction.operands)
        if base <= register and _file(base) == _file(register)
    ]
    if register in instruction.defs or (found and instruction.defs and found[0][1] == 0):
        found = found[1:] or found  # the first one that names it is the result
    reach = 1 if instruction.modifiers & _WIDE or instruction.base[0] == "D" else 0
    if instruction.row.pipe is Pipe.MMA or "128" in instruction.modifiers:
        reach = 3
    near = min((off for off, _ in found), default=0)
    for off, at in found:
        if off == near or off <= reach:
            places.append(f"{at}+{off}" if off else str(at))
    return list(dict.fromkeys(places)) or ["?"]


@lru_cache(1 << 14)
def _bases(operands: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(operand number, register) of everything that the operands name."""
    return tuple((at, number) for at, text in enumerate(operands) for number in named(text))
