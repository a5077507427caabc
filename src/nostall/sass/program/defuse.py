"""Registers that each instruction defines and uses: nvdisasm's register marks, corrected.

nvdisasm's marks have gaps, which were found by experiment:

- P2R, R2P and their uniform variants do not mark the predicates that their mask selects.
- LDGSTS marks its trailing predicate as defined, but only reads it.
- CALL and RET carry the marks of their callees and callers.  Only the registers that their own
  operands name are kept.
- Uniform registers above the last printed column have no marks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nostall.sass.binary.listing import Row
from nostall.sass.program import registers

_REGISTER_NAME = re.compile(r"(?<![\w.$])(?:UR|UP|R|P)\d+(?![\w$])")
_SYMBOL = re.compile(r"`\([^)]*\)|\(\*.*?\*\)")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_UNIFORM_NAME = re.compile(r"\bUR\d+")
_NUMBERS = {registers.name(r): r for r in registers.ALL}
_LAST_UNIFORM_COLUMN = 62
"""nvdisasm 13.5 prints UR0 to UR62; UR62 is also the first register whose pair is cut off."""
_WRITES_UNIFORM = frozenset(("LDCU", "R2UR", "VOTEU", "CREDUX", "REDUX"))


class DefUse(NamedTuple):
    """Register numbers; see the same fields of :class:`.instruction.Instruction`."""

    defs: tuple[int, ...]
    uses: tuple[int, ...]
    guard_registers: tuple[int, ...]
    address_registers: frozenset[int]
    unmarked: tuple[str, ...]
    acts_as_barrier: bool


def def_use(row: Row, guard: str | None, base: str, operands: tuple[str, ...]) -> DefUse:
    """The registers that one instruction of a listing defines and uses."""
    defs = [registers.number(*r) for r in row.defs]
    uses = [registers.number(*r) for r in row.uses]
    guards = named_registers(guard.lstrip("!")) if guard else []
    if base in ("P2R", "R2P", "UP2UR", "UR2UP"):
        masked = _masked_predicates(base, operands)
        (uses if base in ("P2R", "UP2UR") else defs).extend(masked)
        if base in ("R2P", "UR2UP"):
            uses.extend(masked)
    if base == "LDGSTS":
        uses.extend(r for r in defs if registers.is_predicate(r))
        defs = [r for r in defs if not registers.is_predicate(r)]
    if base in ("CALL", "RET"):
        own = named_registers(" ".join(operands))
        defs, uses = [], [r for r in uses if r in own or r - 1 in own]
    uses.extend(guards)
    has_hidden_registers = _names_hidden_columns(row.text)
    if has_hidden_registers:
        _add_hidden_registers(row.text, operands, base, defs, uses)
    address = frozenset(_address_registers(operands)) & frozenset(uses)
    known = {*defs, *uses}
    text = _SYMBOL.sub("", row.text)
    unmarked = tuple(n for n in _REGISTER_NAME.findall(text) if _NUMBERS.get(n, -1) not in known)
    return DefUse(
        _unique(defs), _unique(uses), _unique(guards), address, unmarked, has_hidden_registers
    )


def named_registers(text: str) -> list[int]:
    """Numbers of the registers that a text names, in its order; -1 for a name without register."""
    return [_NUMBERS.get(name, -1) for name in _REGISTER_NAME.findall(text)]


def _names_hidden_columns(text: str) -> bool:
    """Whether an instruction names uniform registers beyond the columns that nvdisasm prints."""
    return "UR" in text and any(
        int(name[2:]) >= _LAST_UNIFORM_COLUMN for name in _UNIFORM_NAME.findall(text)
    )


def _add_hidden_registers(
    text: str, operands: tuple[str, ...], base: str, defs: list[int], uses: list[int]
) -> None:
    """Append uniform registers without a column to ``defs`` and ``uses``, from the operand text.

    The first operand of an instruction that writes uniform registers is its destination, and the
    modifiers give its width.  Descriptors and 64-bit operands are register pairs.  This reads text
    and not nvdisasm's marks, so the caller also makes such an instruction a scheduling barrier.
    """
    opcode = text.split()[1] if text.startswith("@") else text.split()[0]
    width = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    for at, operand in enumerate(operands):
        for name in _UNIFORM_NAME.findall(operand):
            index = int(name[2:])
            if index < _LAST_UNIFORM_COLUMN:
                continue
            is_result = at == 0 and operand == name and (base[0] in "US" or base in _WRITES_UNIFORM)
            is_pair = f"desc[{name}]" in operand or f"{name}.64" in operand
            is_pair = is_pair or (opcode.startswith("UIADD3.64") and not is_result)
            span = width if is_result else 2 if is_pair else 1
            names = (f"UR{i}" for i in range(index, index + span))
            numbers = [_NUMBERS[n] for n in names if n in _NUMBERS]
            (defs if is_result else uses).extend(numbers)


def _unique(items: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(items)))


def _address_registers(operands: tuple[str, ...]) -> list[int]:
    """Each register inside brackets and its successor, which belongs to a 64-bit address."""
    numbers: list[int] = []
    for operand in operands:
        if "[" not in operand:
            continue
        for part in _BRACKETS.findall(operand):
            for register in named_registers(part):
                numbers += (register, register + 1)
    return numbers


def _masked_predicates(base: str, operands: tuple[str, ...]) -> list[int]:
    """Predicates that the immediate mask selects; all seven if the mask is not an immediate."""
    file = "UP" if base.startswith("U") else "P"
    last = operands[-1] if operands else ""
    try:
        mask = int(last, 16)
    except ValueError:
        mask = 0x7F
    return [registers.number(file, i) for i in range(7) if mask >> i & 1]
