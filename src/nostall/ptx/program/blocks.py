"""Blocks of a function: runs of units whose order may change, and the places they may take.

A unit is an instruction, or a scope ``{ … }`` that control enters at its top and leaves at its end.
Branches, returns, labels that are the target of a branch, declarations and other directives are in
no unit: they keep their place in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from nostall.ptx.program.body import Binding, Body, Directive, Label, Nested
from nostall.ptx.program.control_flow import ControlFlow
from nostall.ptx.program.declarations import Declaration
from nostall.ptx.program.instruction import Instruction
from nostall.ptx.program.resources import BARRIER, Reference

_REST_OF_LINE = re.compile(r"[ \t]*(?://[^\r\n]*|/\*[^\r\n]*?\*/[ \t]*(?=[\r\n]|\Z))")


@dataclass(frozen=True)
class Unit:
    """A part of the text that moves as a whole."""

    start: int
    """Offset of its first character."""
    end: int
    """Offset after its last character: after the comment that ends its line, if there is one."""
    instructions: tuple[Instruction, ...]
    """One instruction, or those of a scope."""
    reads: frozenset[Reference]
    writes: frozenset[Reference]
    words: frozenset[str]
    """Names that its instructions use, as they are written."""
    blocks: tuple[Block, ...] = ()
    """The blocks inside a scope."""


@dataclass(frozen=True)
class Block:
    """Units that control passes one after another."""

    units: tuple[Unit, ...]
    """In the order of the text."""
    earliest: tuple[int, ...]
    """Per unit, the first position that it may take: behind the declarations of its names."""
    depth: int
    """Number of loops around the block."""

    @property
    def start(self) -> int:
        """Offset of its first unit, which identifies the block in its module."""
        return self.units[0].start

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of all units."""
        return tuple(i for unit in self.units for i in unit.instructions)

    def __len__(self) -> int:
        return len(self.units)


def build_blocks(text: str, body: Body, flow: ControlFlow) -> tuple[Block, ...]:
    """The outermost blocks of a function; those of scopes are in their units."""
    return tuple(_Region(text, body, flow).split(body.root))


def flatten(blocks: Iterable[Block]) -> Iterator[Block]:
    """Each block, followed by the blocks inside its units."""
    for block in blocks:
        yield block
        for unit in block.units:
            yield from flatten(unit.blocks)


class _OpenBlock:
    """A block whose end is not yet reached."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self._earliest: list[int] = []
        self._declared: list[tuple[Declaration, int]] = []

    def add(self, unit: Unit) -> None:
        places = [at for declared, at in self._declared if _mentions(unit.words, declared)]
        self.units.append(unit)
        self._earliest.append(max(places, default=0))

    def declare(self, declared: Declaration) -> None:
        if self.units:  # otherwise all units of the block stand behind it anyway
            self._declared.append((declared, len(self.units)))

    def mentions(self, declared: Declaration) -> bool:
        return any(_mentions(unit.words, declared) for unit in self.units)

    def finish(self, depth: int) -> Block:
        return Block(tuple(self.units), tuple(self._earliest), depth)


def _mentions(words: frozenset[str], declared: Declaration) -> bool:
    """Whether one of ``words`` is a declared name, or a part of it such as ``v.x``."""
    return any(declared.declares(w) or declared.declares(w.rpartition(".")[0]) for w in words)


class _Region:
    """Collects the blocks between two braces."""

    def __init__(self, text: str, body: Body, flow: ControlFlow) -> None:
        self._text = text
        self._body = body
        self._flow = flow
        self._finished: list[Block] = []
        self._current = _OpenBlock()
        self._prefix: Directive | None = None
        """A directive that moves with the next instruction."""
        self._is_next_alone = False

    def split(self, tree: Nested) -> list[Block]:
        """The blocks of ``tree``."""
        for item in tree.items:
            match item:
                case Label():
                    self._pin_prefix()
                    if item.start in self._flow.referenced:
                        self._cut()
                case Directive():
                    self._pin_prefix()
                    self._directive(item)
                case Nested():
                    self._pin_prefix()
                    self._nested(item)
                case _:
                    self._instruction(self._body.instructions[item])
        self._cut()
        return self._finished

    def _cut(self) -> None:
        """End the present block."""
        if self._current.units:
            depth = self._flow.depth(self._current.units[0].start)
            self._finished.append(self._current.finish(depth))
        self._current = _OpenBlock()

    def _add(self, unit: Unit) -> None:
        self._current.add(unit)
        if self._is_next_alone:
            self._cut()
        self._is_next_alone = False

    def _pin_next(self) -> None:
        """Let the next unit keep its place."""
        self._cut()
        self._is_next_alone = True

    def _pin_prefix(self) -> None:
        """Pin what follows a directive for the next instruction, if no instruction follows it."""
        if self._prefix is not None:
            self._prefix = None
            self._pin_next()

    def _directive(self, directive: Directive) -> None:
        if directive.binding is Binding.UNKNOWN:
            self._pin_next()
        elif directive.binding is Binding.NEXT:
            self._prefix = directive
        # A unit above uses another declaration of the name: it must stay above.
        if any(self._current.mentions(declared) for declared in directive.declared):
            self._cut()
        for declared in directive.declared:
            self._current.declare(declared)

    def _nested(self, tree: Nested) -> None:
        inner = _Region(self._text, self._body, self._flow).split(tree)
        if tree.start in self._flow.open_scopes:
            self._cut()
            self._finished += inner
        else:
            self._add(self._scope_unit(tree, tuple(inner)))

    def _instruction(self, instruction: Instruction) -> None:
        start = instruction.start if self._prefix is None else self._prefix.start
        self._prefix = None
        if instruction.ends_block:
            self._cut()
            self._is_next_alone = False
        else:
            self._add(self._instruction_unit(start, instruction))

    def _instruction_unit(self, start: int, instruction: Instruction) -> Unit:
        return Unit(
            start,
            self._end_with_comment(instruction.end),
            (instruction,),
            instruction.reads,
            instruction.writes,
            instruction.words,
        )

    def _scope_unit(self, tree: Nested, blocks: tuple[Block, ...]) -> Unit:
        """A scope as one unit. What it writes it may write or not, so it reads that, too.

        A scope with a branch may be a loop that waits for other threads: it is a barrier.
        """
        instructions = tuple(self._instructions(tree))
        reads: frozenset[Reference] = frozenset().union(*(i.reads for i in instructions))
        writes: frozenset[Reference] = frozenset().union(*(i.writes for i in instructions))
        if tree.start in self._flow.branching_scopes:
            writes |= BARRIER.writes
        words: frozenset[str] = frozenset().union(*(i.words for i in instructions))
        end = self._end_with_comment(tree.end)
        return Unit(tree.start, end, instructions, reads | writes, writes, words, blocks)

    def _instructions(self, tree: Nested) -> Iterator[Instruction]:
        for item in tree.items:
            if isinstance(item, Nested):
                yield from self._instructions(item)
            elif isinstance(item, int):
                yield self._body.instructions[item]

    def _end_with_comment(self, end: int) -> int:
        """The end of a statement, after the comment that ends its line."""
        match = _REST_OF_LINE.match(self._text, end)
        return match.end() if match else end
