"""Functions as blocks: statements in their scopes, cut where control flow may begin or end.

A block ends after a branch, return or exit, and before a label that an instruction or a branch
table names.  Its *layout* is its sequence of labels, braces, declarations and directives; its
instructions may stand anywhere between them as far as names resolve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from nostall.ptx.safety.declarations import Declared, declared_names, is_declaration
from nostall.ptx.safety.instruction import Instruction, Numbers, decode
from nostall.ptx.safety.reader import ModuleItem, Statement, Unreadable, normalise
from nostall.ptx.safety.scope import PARAMETER_LEVEL, Registers, Scope

_TABLE = re.compile(r"\.(?:branchtargets|callprototype|calltargets)\b")
_BRANCH_TARGETS = re.compile(r"\.branchtargets\b(.*);", re.DOTALL)
_HARMLESS_PRAGMA = re.compile(
    r'\.pragma\s+"(?:nounroll|enable_smem_spilling|frequency\b[^"]*)"\s*;'
)
"""Pragmas that change no result and belong to a place of the text."""
_LOAD_PRAGMA = re.compile(r'\.pragma\s+"used_bytes_mask\b[^"]*"\s*;')
"""Pragma about the next instruction."""


@dataclass(slots=True)
class Block:
    """One basic block."""

    start: int
    """Offset of its first statement."""
    layout: list[str] = field(default_factory=list[str])
    """Everything but instructions, in order."""
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    offsets: list[int] = field(default_factory=list[int])
    """Offset of each instruction in the text without comments."""

    @property
    def is_empty(self) -> bool:
        return not self.layout and not self.instructions


@dataclass(slots=True)
class Placed:
    """A statement with its meaning."""

    statement: Statement
    instruction: Instruction | None = None
    layout: str = ""
    label: str = ""
    """Symbol of the label; empty if it is the name of a table or prototype."""
    is_border: bool = False
    """Whether the statement is not understood, so that nothing crosses it."""


class FunctionReader:
    """Reads the body of one function, and that of candidates for it.

    The tables of names grow while the original is read and are frozen after that.
    """

    def __init__(self, module: Scope, parameters: tuple[Declared, ...], body: Iterable[Statement]):
        self.registers = Registers()
        self.numbers = Numbers()
        outer = Scope(module, PARAMETER_LEVEL, self.registers, parameters)
        labels = dict.fromkeys(s.text for s in body if s.kind == "label")
        self.scope = Scope(outer, 0, self.registers, tuple(Declared(n, "label") for n in labels))
        self._known: dict[tuple[Scope, str, str], Instruction] = {}
        """(scope, text, pragma before it) -> instruction, of the original."""

    def freeze(self) -> None:
        """Give no further numbers: other instructions are foreign."""
        self.numbers.is_frozen = True

    def place(self, item: ModuleItem) -> list[Placed]:
        """The statements of a function body with their meaning, in order.

        Raises :class:`Unreadable` if a name is not declared where it is used.
        """
        placed: list[Placed] = []
        scope, outer = self.scope, list[Scope]()
        braces, pragma = 0, ""
        for statement in item.body:
            kind, text, offset = statement
            if kind == "instruction":
                placed.append(Placed(statement, self._decode(text, offset, scope, pragma)))
                pragma = ""
                continue
            if pragma and kind != "note":
                raise Unreadable(offset, f"{pragma} must stand before an instruction")
            if kind == "open":
                braces += 1
                outer.append(scope)
                scope = scope.open(braces)
            elif kind == "close":
                scope = outer.pop()
            elif kind == "directive" and is_declaration(text):
                scope = scope.declare(text, declared_names(text, offset))
            elif kind == "directive" and _LOAD_PRAGMA.match(text):
                pragma = normalise(text)
                continue
            placed.append(_place_other(statement))
        _mark_tables(placed)
        return placed

    def _decode(self, text: str, offset: int, scope: Scope, pragma: str) -> Instruction:
        key = (scope, text, pragma)
        known = self._known.get(key)
        if known is None:
            known = decode(text, offset, scope, self.numbers, pragma)
            if not self.numbers.is_frozen:
                self._known[key] = known
        return known


def _place_other(statement: Statement) -> Placed:
    """A label, brace or directive."""
    kind, text, _ = statement
    if kind == "label":
        return Placed(statement, layout=text + ":", label=f"{text}@0")
    if kind == "directive":
        understood = (
            is_declaration(text) or _TABLE.match(text) or _HARMLESS_PRAGMA.match(text)
        ) is not None
        return Placed(statement, layout=normalise(text), is_border=not understood)
    return Placed(statement, layout=normalise(text))


def _mark_tables(placed: list[Placed]) -> None:
    """Labels before a table or prototype name it, and are no place to continue at."""
    for label, table in pairwise(placed):
        if label.label and _TABLE.match(table.layout):
            label.label = ""


def jump_targets(placed: list[Placed]) -> frozenset[str]:
    """Symbols of the labels that an instruction or a branch table names."""
    names: set[str] = set()
    for item in placed:
        if item.instruction is not None:
            names |= item.instruction.labels
        elif match := _BRANCH_TARGETS.match(item.layout):
            names |= {f"{name.strip()}@0" for name in match[1].split(",")}
    return frozenset(names)


def cut_blocks(placed: list[Placed], targets: frozenset[str], start: int) -> list[Block]:
    """Cut a function body into blocks; ``start``: offset of the function."""
    block = Block(start)
    blocks = [block]

    def begin(offset: int) -> Block:
        if not blocks[-1].is_empty:
            blocks.append(Block(offset))
        return blocks[-1]

    for item in placed:
        instruction, offset = item.instruction, item.statement.offset
        if instruction is not None:
            block.instructions.append(instruction)
            block.offsets.append(offset)
            if instruction.ends_block:
                block = begin(offset)
        elif item.is_border:
            block = begin(offset)
            block.layout.append(item.layout)
            block = begin(offset)
        else:
            if item.label in targets:
                block = begin(offset)
            block.layout.append(item.layout)
    return blocks
