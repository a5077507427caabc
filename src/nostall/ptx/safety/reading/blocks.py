"""Blocks: statements with their meaning, cut where control flow may begin or end.

A block ends after a branch, return or exit, and before a label that an instruction or a branch
table names.  Its *layout* is its sequence of labels, declarations and directives, and of the braces
that are no compound statement.  Its instructions may stand anywhere between them as far as names
resolve.

Compound statements: braces that control enters at the top and leaves at the end.

Inline assembly and call sequences are written so.  A compound statement counts as one instruction:
a function of all registers that it names and of all state that it touches.  Inside, its own blocks
are compared like those of a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.declarations import Declared, declared_names, is_declaration
from nostall.ptx.safety.reading.instruction import FOREIGN, Instruction, Numbers, decode
from nostall.ptx.safety.reading.lexical import Body, ModuleItem, Unreadable, canonical, normalise
from nostall.ptx.safety.reading.opcodes import Effect
from nostall.ptx.safety.reading.scope import (
    BODY_PATH,
    PARAMETER_PATH,
    Registers,
    Scope,
    label_symbol,
)

_TABLE = re.compile(r"\.(?:branchtargets|callprototype|calltargets)\b")
_BRANCH_TARGETS = re.compile(r"\.branchtargets\b(.*);", re.DOTALL)
_HARMLESS_PRAGMA = re.compile(
    r'\.pragma\s+"(?:nounroll|enable_smem_spilling|frequency\b[^"]*)"\s*;'
)
"""Pragmas that change no result and belong to a place of the text."""


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


@dataclass(frozen=True, slots=True)
class Placed:
    """A statement with its meaning; equal statements may share one."""

    instruction: Instruction | None = None
    layout: str = ""
    label: str = ""
    """Symbol of the label; empty if it is the name of a table or prototype."""
    is_border: bool = False
    """Whether the statement is not understood, so that nothing crosses it."""


class PlacedStatements(NamedTuple):
    """Statements with their meaning, and the offset of each in the text without comments."""

    items: list[Placed]
    offsets: list[int]


def place_other(kind: str, text: str, following: str) -> Placed:
    """A label, brace or directive with its meaning; ``following``: text of the next statement.

    A label before a table or prototype names it, and is no place to continue at.
    """
    if kind == "label":
        is_table = _TABLE.match(following) is not None
        return Placed(layout=text + ":", label="" if is_table else label_symbol(text))
    is_border = (
        kind == "directive"
        and not is_declaration(text)
        and not _TABLE.match(text)
        and not _HARMLESS_PRAGMA.match(text)
    )
    return Placed(layout=canonical(text), is_border=is_border)


def jump_targets(placed: PlacedStatements) -> frozenset[str]:
    """Symbols of the labels that an instruction or a branch table names."""
    names: set[str] = set()
    for item in placed.items:
        if item.instruction is not None:
            names |= item.instruction.labels
        elif match := _BRANCH_TARGETS.match(item.layout):
            names |= {label_symbol(name.strip()) for name in match[1].split(",")}
    return frozenset(names)


def cut_blocks(placed: PlacedStatements, targets: frozenset[str], start: int) -> list[Block]:
    """Cut statements into blocks; ``start``: offset of the first one."""
    block = Block(start)
    blocks = [block]

    def begin(offset: int) -> Block:
        if not blocks[-1].is_empty:
            blocks.append(Block(offset))
        return blocks[-1]

    for item, offset in zip(placed.items, placed.offsets, strict=True):
        instruction = item.instruction
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


_JUMP = re.compile(
    r"(?:@\s*!?\s*[\w$%]+\s*)?(?P<opcode>bra|brx|ret|exit)\b(?:.*?(?P<target>[\w$%]+)\s*)?;$",
    re.DOTALL,
)


def is_closed(kinds: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether no branch leaves a part of a function, from its ``{`` to its ``}``.

    A label is visible in its braces only (PTX ISA 4.3.2), so no branch enters either.
    """
    labels: list[set[str]] = []
    opened: list[int] = []
    levels: list[tuple[int, ...]] = []
    for kind, text in zip(kinds, texts, strict=True):
        if kind == "open":
            opened.append(len(labels))
            labels.append(set())
        elif kind == "label":
            labels[opened[-1]].add(text)
        levels.append(tuple(opened))
        if kind == "close":
            opened.pop()
    for kind, text, visible in zip(kinds, texts, levels, strict=True):
        if kind != "instruction" or not (jump := _JUMP.match(text)):
            continue
        if jump["opcode"] != "bra" or not any(jump["target"] in labels[at] for at in visible):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Compound:
    """A compound statement of the original."""

    instruction: Instruction
    blocks: tuple[Block, ...]
    targets: frozenset[str]


def signature(blocks: Sequence[Block]) -> tuple[object, ...]:
    """What equal compound statements have in common, whatever their order inside."""
    return tuple(
        (tuple(block.layout), tuple(sorted(i.number for i in block.instructions)))
        for block in blocks
    )


def exact_key(blocks: Sequence[Block]) -> tuple[object, ...]:
    """What distinguishes a compound statement, its order inside included."""
    return (
        "compound",
        *((tuple(b.layout), tuple(i.number for i in b.instructions)) for b in blocks),
    )


def combine(
    number: int, blocks: Sequence[Block], path: str, registers: Registers, offset: int
) -> Instruction:
    """The instruction that stands for a compound statement whose scope has this path.

    What it writes it may also keep, so it reads that as well.  If control branches inside, no
    operation of a warp and no barrier crosses it.
    """
    inner = tuple(i for block in blocks for i in block.instructions)
    inside = {label_symbol(text[:-1]) for b in blocks for text in b.layout if text.endswith(":")}
    for instruction in inner:
        if instruction.ends_block and not (instruction.labels and instruction.labels <= inside):
            raise Unreadable(offset, f"{instruction.opcode} leaves its braces")
    writes = dict.fromkeys(r for i in inner for r in i.writes)
    reads = dict.fromkeys(r for i in inner for r in i.reads)
    if any(i.ends_block for i in inner):
        writes |= dict.fromkeys((state.EXCHANGES, state.BARRIERS))
    outer_writes = tuple(r for r in writes if not registers.is_inside(r, path))
    outer_reads = tuple(r for r in reads | writes if not registers.is_inside(r, path))
    return Instruction(
        number=number,
        reads=outer_reads,
        writes=outer_writes,
        opcode="{ ... }",
        effect=Effect.COMPOUND,
        hints="",
        in_flight=frozenset().union(*(i.in_flight for i in inner)),
        labels=frozenset(),
        inner=inner,
    )


_LOAD_PRAGMA = re.compile(r'\.pragma\s+"used_bytes_mask\b[^"]*"\s*;')
"""A pragma of the load that follows it: it has to stay in front of this load."""

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
