"""Blocks: statements with their meaning, cut where control flow may begin or end.

A block ends after a branch, return or exit, and before a label that an instruction or a branch
table names.  Its *layout* is its sequence of labels, declarations and directives, and of the braces
that are no compound statement.  Its instructions may stand anywhere between them as far as names
resolve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from nostall.ptx.safety.instruction import Instruction
from nostall.ptx.safety.reader import Statement, normalise
from nostall.ptx.safety.scope import label_symbol

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


@dataclass(slots=True)
class Placed:
    """A statement with its meaning."""

    offset: int
    instruction: Instruction | None = None
    layout: str = ""
    label: str = ""
    """Symbol of the label; empty if it is the name of a table or prototype."""
    is_border: bool = False
    """Whether the statement is not understood, so that nothing crosses it."""


def place_other(statement: Statement, is_declaration: bool) -> Placed:
    """A label, brace or directive with its meaning."""
    kind, text, offset = statement
    if kind == "label":
        return Placed(offset, layout=text + ":", label=label_symbol(text))
    layout = normalise(text)
    is_border = (
        kind == "directive"
        and not is_declaration
        and not _TABLE.match(text)
        and not _HARMLESS_PRAGMA.match(text)
    )
    return Placed(offset, layout=layout, is_border=is_border)


def mark_tables(placed: list[Placed]) -> None:
    """Labels before a table or prototype name it, and are no place to continue at."""
    for label, table in pairwise(placed):
        if label.label and _TABLE.match(table.layout):
            label.label = ""


def jump_targets(placed: Iterable[Placed]) -> frozenset[str]:
    """Symbols of the labels that an instruction or a branch table names."""
    names: set[str] = set()
    for item in placed:
        if item.instruction is not None:
            names |= item.instruction.labels
        elif match := _BRANCH_TARGETS.match(item.layout):
            names |= {label_symbol(name.strip()) for name in match[1].split(",")}
    return frozenset(names)


def cut_blocks(placed: Iterable[Placed], targets: frozenset[str], start: int) -> list[Block]:
    """Cut statements into blocks; ``start``: offset of the first one."""
    block = Block(start)
    blocks = [block]

    def begin(offset: int) -> Block:
        if not blocks[-1].is_empty:
            blocks.append(Block(offset))
        return blocks[-1]

    for item in placed:
        instruction, offset = item.instruction, item.offset
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
