"""Definitions and uses of each instruction: nvdisasm's register marks with their gaps closed.

Gaps found by experiment: ``P2R``/``R2P`` (and their uniform twins) do not list the predicates that
their mask names; LDGSTS's trailing predicate is marked defined although it is only read; CALL and
RET carry marks of their callees and callers, of which only the operands they name are kept.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nostall.sass.binary.listing import Row
from nostall.sass.program import registers

_NAME = re.compile(r"(?<![\w.$])(?:UR|UP|R|P)\d+(?![\w$])")
_SYMBOL = re.compile(r"`\([^)]*\)|\(\*.*?\*\)")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_UNIFORM = re.compile(r"\bUR\d+")
_NUMBERS = {registers.name(r): r for r in registers.ALL}
_LAST_UNIFORM_COLUMN = 62
"""nvdisasm 13.5 prints UR0..UR62; the number is also the first whose pair is cut off."""
_TO_UNIFORM = frozenset(("LDCU", "R2UR", "VOTEU", "CREDUX", "REDUX"))


class DefUse(NamedTuple):
    """Register numbers; see :class:`~nostall.sass.program.instruction.Instruction`."""

    defs: tuple[int, ...]
    uses: tuple[int, ...]
    guards: tuple[int, ...]
    address: frozenset[int]
    unmarked: tuple[str, ...]
    glued: bool


def of(row: Row, guard: str | None, base: str, operands: tuple[str, ...]) -> DefUse:
    """Definitions and uses of one listing row."""
    defs = [registers.number(*r) for r in row.defs]
    uses = [registers.number(*r) for r in row.uses]
    guards = named(guard.lstrip("!")) if guard else []
    if base in ("P2R", "R2P", "UP2UR", "UR2UP"):
        masked = _mask_predicates(base, operands)
        (uses if base in ("P2R", "UP2UR") else defs).extend(masked)
        if base in ("R2P", "UR2UP"):
            uses.extend(masked)
    if base == "LDGSTS":
        uses.extend(r for r in defs if registers.is_predicate(r))
        defs = [r for r in defs if not registers.is_predicate(r)]
    if base in ("CALL", "RET"):
        kept = named(" ".join(operands))
        defs, uses = [], [r for r in uses if r in kept or r - 1 in kept]
    uses.extend(guards)
    hidden = _names_hidden_columns(row.text)
    if hidden:
        _beyond_columns(row.text, operands, base, defs, uses)
    address = frozenset(_address(operands)) & frozenset(uses)
    known = {*defs, *uses}
    text = _SYMBOL.sub("", row.text)
    unmarked = tuple(n for n in _NAME.findall(text) if _NUMBERS.get(n, -1) not in known)
    return DefUse(_unique(defs), _unique(uses), _unique(guards), address, unmarked, hidden)


def _names_hidden_columns(text: str) -> bool:
    """Whether an instruction names uniform registers above the last column nvdisasm prints."""
    return "UR" in text and any(
        int(name[2:]) >= _LAST_UNIFORM_COLUMN for name in _UNIFORM.findall(text)
    )


def _beyond_columns(
    text: str, operands: tuple[str, ...], base: str, defs: list[int], uses: list[int]
) -> None:
    """Uniform registers above the last column, from the operands' text.

    The first operand of an instruction that writes uniform registers is its destination, as wide
    as its modifiers say; descriptors and 64-bit operands are pairs.  Because this is a reading of
    text and not of the vendor's marks, such instructions are also pinned by the caller.
    """
    opcode = text.split()[1] if text.startswith("@") else text.split()[0]
    width = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    for at, operand in enumerate(operands):
        for name in _UNIFORM.findall(operand):
            index = int(name[2:])
            if index < _LAST_UNIFORM_COLUMN:
                continue
            is_result = at == 0 and operand == name and (base[0] in "US" or base in _TO_UNIFORM)
            pair = f"desc[{name}]" in operand or f"{name}.64" in operand
            pair = pair or (opcode.startswith("UIADD3.64") and not is_result)
            span = width if is_result else 2 if pair else 1
            names = (f"UR{i}" for i in range(index, index + span))
            numbers = [_NUMBERS[n] for n in names if n in _NUMBERS]
            (defs if is_result else uses).extend(numbers)


def _unique(items: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(items)))


def named(text: str) -> list[int]:
    """The registers that a text names, in its order; -1 for one that does not exist."""
    return [_NUMBERS.get(name, -1) for name in _NAME.findall(text)]


def _address(operands: tuple[str, ...]) -> list[int]:
    """Registers inside brackets; each names itself and, when 64 bits wide, the next one."""
    found: list[int] = []
    for operand in operands:
        if "[" not in operand:
            continue
        for part in _BRACKET.findall(operand):
            for register in named(part):
                found += (register, register + 1)
    return found


def _mask_predicates(base: str, operands: tuple[str, ...]) -> list[int]:
    """Predicates that the immediate mask selects; all of them when there is no immediate."""
    file = "UP" if base.startswith("U") else "P"
    last = operands[-1] if operands else ""
    try:
        mask = int(last, 16)
    except ValueError:
        mask = 0x7F
    return [registers.number(file, i) for i in range(7) if mask >> i & 1]
