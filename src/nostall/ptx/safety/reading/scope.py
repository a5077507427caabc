"""Scopes: what a name means at a point of a function.

A declaration holds from its place to the end of its braces, and hides outer names.  The scope after
a declaration is a new object, and equal places of two texts have the same one: statements are read
once for each scope.

A scope has a *path*, which distinguishes equal names.  The path of a numbered brace is its parent's
with the number; all compound statements of one scope share a path, since their names do not live
longer than they do.
"""

from __future__ import annotations

from typing import NamedTuple

from nostall.ptx.safety.reading.declarations import MAX_DIGITS, Declared, Space
from nostall.ptx.safety.reading.pseudo_registers import COUNT as FIRST_REGISTER

MODULE_PATH, PARAMETER_PATH, BODY_PATH = "module", "parameters", ""
_COMPOUND = ".c"


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
        self._paths: list[str] = []

    def number(self, name: str, path: str) -> int:
        """Number of the register ``name`` of the scope with this path."""
        symbol = _symbol(name, path)
        known = self._numbers.get(symbol)
        if known is None:
            known = self._numbers[symbol] = FIRST_REGISTER + len(self._names)
            self._names.append(name)
            self._paths.append(path)
        return known

    def is_inside(self, register: int, path: str) -> bool:
        """Whether a register is declared in a scope with this path, or in one inside it."""
        return register >= FIRST_REGISTER and self._paths[register - FIRST_REGISTER].startswith(
            path
        )

    def name(self, register: int) -> str:
        """Name of a register in the PTX text."""
        return self._names[register - FIRST_REGISTER]


class Scope:
    """Names that are visible after a declaration or an opening brace."""

    def __init__(
        self,
        parent: Scope | None,
        path: str,
        registers: Registers,
        declared: tuple[Declared, ...] = (),
    ) -> None:
        self.parent = parent
        self.path = path
        self.registers = registers
        self._single = {d.name: d for d in declared if not d.size}
        self._ranges = [d for d in declared if d.size]
        self._children: dict[tuple[str, str], Scope] = {}
        self._known: dict[str, Name | None] = {}

    def declare(self, text: str, declared: tuple[Declared, ...]) -> Scope:
        """The scope after a declaration with this text."""
        return self._child((text, self.path), declared)

    def open(self, number: int) -> Scope:
        """The scope after a brace that control may enter or leave elsewhere."""
        return self._child(("{", f"{self.path}/{number}"), ())

    def open_compound(self) -> Scope:
        """The scope after the brace of a compound statement."""
        return self._child(("{", self.path + _COMPOUND), ())

    def _child(self, key: tuple[str, str], declared: tuple[Declared, ...]) -> Scope:
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
            is_index = index.isdecimal() and len(index) <= MAX_DIGITS
            if name.startswith(ranged.name) and is_index and int(index) < ranged.size:
                # ptxas takes %r01 for %r1.
                declared, name = ranged, f"{ranged.name}{int(index)}"
        if declared is None:
            return self.parent.resolve(name) if self.parent else None
        number = self.registers.number(name, self.path) if declared.space == "reg" else -1
        return Name(declared.space, number, _symbol(name, self.path), declared.is_vector)


def _symbol(name: str, path: str) -> str:
    return f"{name}@{path}"


def label_symbol(name: str) -> str:
    """Symbol of a label; labels of inner scopes have the same one."""
    return _symbol(name, BODY_PATH)
