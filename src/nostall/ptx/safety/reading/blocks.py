"""Blocks: statements with their meaning, cut where control flow may begin or end.

A block ends after a branch, return or exit, and before a label that an instruction or a branch
table names.  Its *layout* is its sequence of labels, declarations and directives, and of the braces
that are no compound statement.  Its instructions may stand anywhere between them as far as names
resolve.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nostall.ptx.safety.reading.declarations import is_declaration
from nostall.ptx.safety.reading.instruction import Instruction
from nostall.ptx.safety.reading.lexical import canonical
from nostall.ptx.safety.reading.scope import label_symbol

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
