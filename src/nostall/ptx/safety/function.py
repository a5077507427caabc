"""Function reader: the statements of one function, and of candidates for it, with their meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nostall.ptx.safety.blocks import (
    Block,
    Placed,
    cut_blocks,
    jump_targets,
    mark_tables,
    place_other,
)
from nostall.ptx.safety.compound import Compound, combine, exact_key, is_closed, signature
from nostall.ptx.safety.declarations import Declared, declared_names, is_declaration
from nostall.ptx.safety.instruction import FOREIGN, Instruction, Numbers, decode
from nostall.ptx.safety.reader import ModuleItem, Statement, Unreadable, normalise
from nostall.ptx.safety.scope import BODY_PATH, PARAMETER_PATH, Registers, Scope

_LOAD_PRAGMA = re.compile(r'\.pragma\s+"used_bytes_mask\b[^"]*"\s*;')
"""Pragma about the next instruction."""

IsEqual = Callable[[Compound, Sequence[Block]], bool]
"""Whether blocks compute what a compound statement of the original computes."""


class _Part(NamedTuple):
    """Statements of one scope: from ``start`` to before ``end``."""

    statements: tuple[Statement, ...]
    closing: dict[int, int]
    """Position of a ``{`` -> position of its ``}``."""
    start: int
    end: int


class FunctionReader:
    """Reads one function of the original, then candidates for it.

    Numbers and scopes grow while the original is read.  After :meth:`freeze` an instruction that
    the original does not have gets the number :data:`FOREIGN`.
    """

    def __init__(self, module: Scope, parameters: tuple[Declared, ...], item: ModuleItem) -> None:
        self.registers = Registers()
        self.compounds: list[Compound] = []
        self._numbers = Numbers()
        outer = Scope(module, PARAMETER_PATH, self.registers, parameters)
        labels = dict.fromkeys(s.text for s in item.body if s.kind == "label")
        declared = tuple(Declared(name, "label") for name in labels)
        self._scope = Scope(outer, BODY_PATH, self.registers, declared)
        self._known: dict[tuple[Scope, str, str], Instruction] = {}
        """(scope, text, pragma before it) -> instruction of the original."""
        self._known_compounds: dict[tuple[Scope, tuple[str, ...]], Instruction] = {}
        """(scope, texts of the statements) -> compound statement of the original."""
        self._by_signature: dict[tuple[object, ...], list[Compound]] = {}
        self._is_equal: IsEqual | None = None

    def freeze(self, is_equal: IsEqual) -> None:
        """End the reading of the original; ``is_equal`` compares compound statements."""
        self._numbers.is_frozen = True
        self._is_equal = is_equal

    def place(self, item: ModuleItem) -> list[Placed]:
        """The statements of a function body with their meaning, in order.

        Raises :class:`Unreadable` if a name is not declared where it is used.
        """
        opened: list[int] = []
        closing: dict[int, int] = {}
        for position, statement in enumerate(item.body):
            if statement.kind == "open":
                opened.append(position)
            elif statement.kind == "close":
                closing[opened.pop()] = position
        return self._place(_Part(item.body, closing, 0, len(item.body)), self._scope)

    def _place(self, part: _Part, scope: Scope) -> list[Placed]:
        """The statements of one scope, and of braces in it that are no compound statement."""
        placed: list[Placed] = []
        braces, pragma = 0, ""
        position = part.start
        outer: list[Scope] = []
        while position < part.end:
            statement = part.statements[position]
            kind, text, offset = statement
            position += 1
            if kind == "instruction":
                placed.append(Placed(offset, self._decode(text, offset, scope, pragma)))
                pragma = ""
                continue
            if pragma and kind != "note":
                raise Unreadable(offset, f"{pragma} must stand before an instruction")
            if kind == "open":
                end = part.closing[position - 1]
                compound = self._compound(part, position - 1, end, scope)
                if compound is not None:
                    placed.append(Placed(offset, compound))
                    position = end + 1
                    continue
                braces += 1
                outer.append(scope)
                scope = scope.open(braces)
            elif kind == "close":
                scope = outer.pop()
            elif kind == "directive" and _LOAD_PRAGMA.match(text):
                pragma = normalise(text)
                continue
            declares = kind == "directive" and is_declaration(text)
            if declares:
                scope = scope.declare(text, declared_names(text, offset))
            placed.append(place_other(statement, declares))
        mark_tables(placed)
        return placed

    def _decode(self, text: str, offset: int, scope: Scope, pragma: str) -> Instruction:
        key = (scope, text, pragma)
        known = self._known.get(key)
        if known is None:
            known = decode(text, offset, scope, self._numbers, pragma)
            if not self._numbers.is_frozen:
                self._known[key] = known
        return known

    def _compound(self, part: _Part, start: int, end: int, scope: Scope) -> Instruction | None:
        """The compound statement between two braces; None if control enters or leaves elsewhere."""
        statements = part.statements[start : end + 1]
        key = (scope, tuple(s.text for s in statements))
        known = self._known_compounds.get(key)
        if known is not None:
            return known
        if not is_closed(statements):
            return None
        inner_scope, offset = scope.open_compound(), statements[0].offset
        placed = self._place(part._replace(start=start + 1, end=end), inner_scope)
        targets = jump_targets(placed)
        blocks = cut_blocks(placed, targets, offset)
        if self._is_equal is not None:
            return self._match(blocks, inner_scope, offset)
        number = self._numbers.number(exact_key(blocks))
        found = combine(number, blocks, inner_scope.path, self.registers, offset)
        if all(c.instruction.number != number for c in self.compounds):
            compound = Compound(found, tuple(blocks), targets)
            self.compounds.append(compound)
            self._by_signature.setdefault(signature(blocks), []).append(compound)
        self._known_compounds[key] = found
        return found

    def _match(self, blocks: list[Block], scope: Scope, offset: int) -> Instruction:
        """The equal compound statement of the original, or a foreign one."""
        assert self._is_equal is not None
        found = combine(FOREIGN, blocks, scope.path, self.registers, offset)
        for compound in self._by_signature.get(signature(blocks), ()):
            if self._is_equal(compound, blocks):
                return compound.instruction._replace(inner=found.inner)
        return found
