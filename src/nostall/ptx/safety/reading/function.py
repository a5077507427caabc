"""Function reader: the statements of one function, and of candidates for it, with their meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nostall.ptx.safety.reading.blocks import (
    Block,
    Placed,
    PlacedStatements,
    cut_blocks,
    jump_targets,
    place_other,
)
from nostall.ptx.safety.reading.compound import Compound, combine, exact_key, is_closed, signature
from nostall.ptx.safety.reading.declarations import Declared, declared_names, is_declaration
from nostall.ptx.safety.reading.instruction import FOREIGN, Instruction, Numbers, decode
from nostall.ptx.safety.reading.lexical import Body, ModuleItem, Unreadable, normalise
from nostall.ptx.safety.reading.scope import BODY_PATH, PARAMETER_PATH, Registers, Scope

_LOAD_PRAGMA = re.compile(r'\.pragma\s+"used_bytes_mask\b[^"]*"\s*;')
"""Pragma about the next instruction."""

IsEqual = Callable[[Compound, Sequence[Block]], bool]
"""Whether blocks compute what a compound statement of the original computes."""


class _Part(NamedTuple):
    """Statements of one scope: from ``start`` to before ``end``."""

    body: Body
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
        statements = zip(item.body.kinds, item.body.texts, strict=True)
        labels = dict.fromkeys(text for kind, text in statements if kind == "label")
        declared = tuple(Declared(name, "label") for name in labels)
        self._scope = Scope(outer, BODY_PATH, self.registers, declared)
        self._known: dict[tuple[Scope, str, str], Placed] = {}
        """(scope, text, pragma before it) -> instruction of the original."""
        self._known_others: dict[tuple[str, str, str], Placed] = {}
        """(kind, text, next text after a label) -> other statement of the original."""
        self._known_compounds: dict[tuple[Scope, tuple[str, ...]], Placed] = {}
        """(scope, texts of the statements) -> compound statement of the original."""
        self._by_signature: dict[tuple[object, ...], list[Compound]] = {}
        self._is_equal: IsEqual | None = None

    def freeze(self, is_equal: IsEqual) -> None:
        """End the reading of the original; ``is_equal`` compares compound statements."""
        self._numbers.is_frozen = True
        self._is_equal = is_equal

    def place(self, item: ModuleItem) -> PlacedStatements:
        """The statements of a function body with their meaning, in order.

        Raises :class:`Unreadable` if a name is not declared where it is used.
        """
        opened: list[int] = []
        closing: dict[int, int] = {}
        for position, kind in enumerate(item.body.kinds):
            if kind == "open":
                opened.append(position)
            elif kind == "close":
                closing[opened.pop()] = position
        return self._place(_Part(item.body, closing, 0, len(item.body.kinds)), self._scope)

    def _place(self, part: _Part, scope: Scope) -> PlacedStatements:
        """The statements of one scope, and of braces in it that are no compound statement."""
        placed = PlacedStatements([], [])
        add, add_offset = placed.items.append, placed.offsets.append
        kinds, texts, offsets = part.body
        braces, pragma = 0, ""
        position = part.start
        outer: list[Scope] = []
        while position < part.end:
            kind, text, offset = kinds[position], texts[position], offsets[position]
            position += 1
            if kind == "instruction":
                add(self._instruction(text, offset, scope, pragma))
                add_offset(offset)
                pragma = ""
                continue
            if pragma and kind != "note":
                raise Unreadable(offset, f"{pragma} must stand before an instruction")
            if kind == "open":
                end = part.closing[position - 1]
                compound = self._compound(part, position - 1, end, scope)
                if compound is not None:
                    add(compound)
                    add_offset(offset)
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
            elif kind == "directive" and is_declaration(text):
                scope = scope.declare(text, declared_names(text, offset))
            add(self._other(kind, text, texts[position] if position < part.end else ""))
            add_offset(offset)
        return placed

    def _instruction(self, text: str, offset: int, scope: Scope, pragma: str) -> Placed:
        key = (scope, text, pragma)
        known = self._known.get(key)
        if known is None:
            known = Placed(decode(text, offset, scope, self._numbers, pragma))
            if not self._numbers.is_frozen:
                self._known[key] = known
        return known

    def _other(self, kind: str, text: str, following: str) -> Placed:
        key = (kind, text, following if kind == "label" else "")
        known = self._known_others.get(key)
        if known is None:
            known = place_other(kind, text, following)
            if not self._numbers.is_frozen:
                self._known_others[key] = known
        return known

    def _compound(self, part: _Part, start: int, end: int, scope: Scope) -> Placed | None:
        """The compound statement between two braces; None if control enters or leaves elsewhere."""
        texts = part.body.texts[start : end + 1]
        key = (scope, tuple(texts))
        known = self._known_compounds.get(key)
        if known is not None:
            return known
        if not is_closed(part.body.kinds[start : end + 1], texts):
            return None
        inner_scope, offset = scope.open_compound(), part.body.offsets[start]
        placed = self._place(part._replace(start=start + 1, end=end), inner_scope)
        targets = jump_targets(placed)
        blocks = cut_blocks(placed, targets, offset)
        if self._is_equal is not None:
            return Placed(self._match(blocks, inner_scope, offset))
        number = self._numbers.number(exact_key(blocks))
        found = combine(number, blocks, inner_scope.path, self.registers, offset)
        if all(c.instruction.number != number for c in self.compounds):
            compound = Compound(found, tuple(blocks), targets)
            self.compounds.append(compound)
            self._by_signature.setdefault(signature(blocks), []).append(compound)
        self._known_compounds[key] = Placed(found)
        return self._known_compounds[key]

    def _match(self, blocks: list[Block], scope: Scope, offset: int) -> Instruction:
        """The equal compound statement of the original, or a foreign one."""
        assert self._is_equal is not None
        found = combine(FOREIGN, blocks, scope.path, self.registers, offset)
        for compound in self._by_signature.get(signature(blocks), ()):
            if self._is_equal(compound, blocks):
                return compound.instruction._replace(inner=found.inner)
        return found
