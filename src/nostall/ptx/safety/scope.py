"""Scopes: what a name means at a point of a function.

A declaration holds from its place to the end of its braces, and hides outer names.  The scope after
a declaration is a new object, and equal places of two texts have the same one: statements are read
once for each scope.
"""

from __future__ import annotations

from typing import NamedTuple

from nostall.ptx.safety.declarations import Declared, Space
from nostall.ptx.safety.pseudo_registers import COUNT as FIRST_REGISTER

MODULE_LEVEL, PARAMETER_LEVEL = -2, -1
"""Brace numbers of the scopes around a function's body, which has 0."""


class Name(NamedTuple):
    """Meaning of a name."""

    space: Space
    register: int
    """Number of the register; -1 if the name is no register."""
    symbol: str
    """Text that distinguishes the name from equal names of other scopes."""
    is_vector: bool = False


class Registers:
    """Numbers of a function's registers, after those of the pseudo registers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, symbol: str, name: str) -> int:
        """Number of the register with this distinguishing text."""
        known = self._numbers.get(symbol)
        if known is None:
            known = self._numbers[symbol] = FIRST_REGISTER + len(self._names)
            self._names.append(name)
        return known

    def name(self, register: int) -> str:
        """Name of a register in the PTX text."""
        return self._names[register - FIRST_REGISTER]


class Scope:
    """Names that are visible after a declaration or an opening brace."""

    def __init__(
        self,
        parent: Scope | None,
        brace: int,
        registers: Registers,
        declared: tuple[Declared, ...] = (),
    ) -> None:
        self.parent = parent
        self.brace = brace
        """Number of the opening brace in the function; it distinguishes equal names."""
        self.registers = registers
        self._single = {d.name: d for d in declared if not d.size}
        self._ranges = [d for d in declared if d.size]
        self._children: dict[tuple[str, int], Scope] = {}
        self._known: dict[str, Name | None] = {}

    def declare(self, text: str, declared: tuple[Declared, ...]) -> Scope:
        """The scope after a declaration with this text."""
        return self._child((text, self.brace), declared)

    def open(self, brace: int) -> Scope:
        """The scope after the opening brace number ``brace`` of the function."""
        return self._child(("{", brace), ())

    def _child(self, key: tuple[str, int], declared: tuple[Declared, ...]) -> Scope:
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = Scope(self, key[1], self.registers, declared)
        return child

    def resolve(self, name: str) -> Name | None:
        """Meaning of a name; None if it is not declared here."""
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> Name | None:
        declared = self._single.get(name)
        for ranged in self._ranges:
            index = name[len(ranged.name) :]
            if name.startswith(ranged.name) and index.isdecimal() and int(index) < ranged.size:
                # ptxas takes %r01 for %r1.
                declared, name = ranged, f"{ranged.name}{int(index)}"
        if declared is None:
            return self.parent.resolve(name) if self.parent else None
        symbol = f"{name}@{self.brace}"
        is_register = declared.space == "reg"
        number = self.registers.number(symbol, name) if is_register else -1
        return Name(declared.space, number, symbol, declared.is_vector)
