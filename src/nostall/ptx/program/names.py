"""Names in operands: registers, parts of registers, special registers, symbols."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.ptx.program.declarations import Scope
from nostall.ptx.program.resources import EVERYTHING, PURE, Effect
from nostall.ptx.program.special_registers import special_register

_CONSTANTS = frozenset(("_", "WARP_SZ"))
"""Words that name nothing that changes."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a word of an operand means."""

    register: str | None = None
    """The unique name of a register; None for a number, a symbol or a special register."""
    is_part: bool = False
    """Whether the word names a part of the register, as ``v.x`` and ``d.h0`` do."""
    effect: Effect = PURE
    """The effect of reading it, if it is a special register."""
    is_known: bool = True
    """False if nothing declares the name: it may be anything, so the instruction is a fence."""


_NOTHING = Name()


def resolve(word: str, scope: Scope) -> Name:
    """The meaning of ``word`` in ``scope``; a name that is not declared counts as a register."""
    if word in _CONSTANTS or word[0].isdecimal() or word[0] == ".":
        return _NOTHING
    if scope.find(word):
        return Name(scope.register(word))
    base = word.rpartition(".")[0]
    if base and scope.find(base):
        return Name(scope.register(base), is_part=True)
    effect = special_register(word)
    if effect is not None:
        return Name(effect=effect)
    return Name(word, effect=EVERYTHING, is_known=False)
