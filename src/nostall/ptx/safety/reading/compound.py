"""Compound statements: braces that control enters at the top and leaves at the end.

Inline assembly and call sequences are written so.  A compound statement counts as one instruction:
a function of all registers that it names and of all state that it touches.  Inside, its own blocks
are compared like those of a function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.blocks import Block
from nostall.ptx.safety.reading.instruction import Instruction
from nostall.ptx.safety.reading.lexical import Unreadable
from nostall.ptx.safety.reading.opcodes import Effect
from nostall.ptx.safety.reading.scope import Registers, label_symbol

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
