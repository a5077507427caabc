"""A cubin as a program: functions of instructions that can be permuted and re-timed in place."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.core import garbage_collector
from nostall.core.errors import BadBinary, BadInput
from nostall.sass.binary import encoding
from nostall.sass.binary.cubin import Cubin, TextSection
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.binary.listing import Listing, disassemble
from nostall.sass.program import blocks as cfg
from nostall.sass.program import defuse
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction, parse_text

_NOP = 0x7918
_OPCODE_BITS = (1 << 16) - 1


@dataclass(frozen=True)
class Function:
    """One text section: an entry kernel or a device function.

    ``instructions`` stand in their present order; each remembers its original ``index``.  Blocks
    are ranges of positions and never change, because instructions move only inside a block.
    """

    name: str
    text: TextSection
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]

    @property
    def is_kernel(self) -> bool:
        return self.text.is_kernel

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """Block number of each position."""
        return tuple(i for i, block in enumerate(self.blocks) for _ in range(len(block)))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Original indices that an unreadable record may name: they must stay in place."""
        return frozenset(offset // WORD_BYTES for offset in self.text.pinned)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Original indices in blocks next to code that is not in this text section: whatever that
        code relies on is unknown, so nothing there may move or change."""
        open_blocks = (range(b.start, b.end) for b in self.blocks if b.open)
        return frozenset(index for block in open_blocks for index in block)

    def reordered(self, order: Sequence[Instruction]) -> Function:
        """The function with its instructions in another order (or with other control words)."""
        if sorted(i.index for i in order) != list(range(len(self.instructions))):
            raise BadInput(
                f"{self.name}: the new order is not a permutation of its "
                f"{len(self.instructions)} instructions; each must appear exactly once"
            )
        return replace(self, instructions=tuple(order))


@dataclass(frozen=True)
class Program:
    """All functions of a cubin.  ``from_cubin`` and ``to_cubin`` are inverse when nothing moves."""

    cubin: Cubin
    functions: tuple[Function, ...]

    @classmethod
    def from_cubin(cls, data: bytes) -> Program:
        """Parse, disassemble and build blocks.

        Raises :class:`~nostall.core.errors.BadBinary`,
        :class:`~nostall.core.errors.UnsupportedArchitecture`, or
        :class:`~nostall.core.errors.MissingPart` when nvdisasm is not there.
        """
        cubin = Cubin.parse(data)
        with garbage_collector.paused():
            listings = disassemble(cubin)
            return cls(cubin, tuple(_function(cubin, text, listings) for text in cubin.texts))

    @property
    def sm(self) -> int:
        """Architecture number, such as 90."""
        return self.cubin.sm

    @property
    def kernels(self) -> tuple[Function, ...]:
        """The entry functions."""
        return tuple(f for f in self.functions if f.is_kernel)

    def function(self, name: str) -> Function:
        """The function called ``name``."""
        for function in self.functions:
            if function.name == name:
                return function
        raise BadInput(f"no function {name!r}; there are {[f.name for f in self.functions]}")

    def kernel(self, name: str | None = None) -> Function:
        """The entry kernel called ``name``; without a name, the only one."""
        names = [f.name for f in self.kernels]
        if name is None and len(names) == 1:
            return self.kernels[0]
        if name is None or name not in names:
            asked = "no kernel was named" if name is None else f"no kernel {name!r}"
            raise BadInput(f"{asked}; choose one of {names} with --kernel NAME")
        return self.function(name)

    def with_function(self, changed: Function) -> Program:
        """The program with one function replaced by its changed version."""
        return replace(
            self,
            functions=tuple(changed if f.name == changed.name else f for f in self.functions),
        )

    def to_cubin(self) -> bytes:
        """Bytes: every word re-encoded from its fields, every recorded offset moved along."""
        out = bytearray(self.cubin.data)
        for function in self.functions:
            _emit(function, out)
        return bytes(out)


def _emit(function: Function, out: bytearray) -> None:
    text = function.text
    position = {ins.index: at for at, ins in enumerate(function.instructions)}
    for at, instruction in enumerate(function.instructions):
        word = encoding.encode(instruction.payload, instruction.control)
        start = text.at + at * WORD_BYTES
        out[start : start + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")
    for record in text.records:
        if not record.fixed:
            index, inside = divmod(record.offset, WORD_BYTES)
            moved = position[index] * WORD_BYTES + inside
            out[record.at : record.at + record.width] = moved.to_bytes(record.width, "little")


def _function(cubin: Cubin, text: TextSection, listings: dict[str, Listing]) -> Function:
    listing = listings.get(text.name)
    if listing is None:
        raise BadBinary(f"nvdisasm printed nothing for section .text.{text.name}")
    words = _words(cubin.data[text.at : text.at + text.size])
    instructions = tuple(_instructions(text, listing, words))
    labels = {name: offset // WORD_BYTES for name, offset in listing.labels.items()}
    fixed = sorted({r.offset // WORD_BYTES for r in text.records if r.fixed})
    entries = [offset // WORD_BYTES for offset, _ in text.entries]
    blocks = cfg.build(instructions, labels, entries, fixed, text.is_kernel)
    return Function(text.name, text, instructions, blocks)


def _words(code: bytes) -> list[int]:
    return [lo | hi << 64 for lo, hi in struct.iter_unpack("<QQ", code)]


def _instructions(text: TextSection, listing: Listing, words: list[int]) -> Iterable[Instruction]:
    """One instruction per word: the listed rows, then the padding that nvdisasm leaves out."""
    if len(listing.rows) > len(words):
        raise BadBinary(f".text.{text.name}: more rows listed than the section has words")
    found: list[Instruction] = []
    for index, row in enumerate(listing.rows):
        if row.offset != index * WORD_BYTES or row.word != words[index]:
            raise BadBinary(
                f".text.{text.name}: nvdisasm's row at {row.offset:#x} does not agree with the "
                f"file's bytes at {index * WORD_BYTES:#x}"
            )
        guard, opcode, operands = parse_text(row.text)
        base = opcode.partition(".")[0]
        payload, control = encoding.decode(row.word)
        effects = defuse.of(row, guard, base, operands)
        found.append(
            Instruction(
                index,
                row.text,
                payload,
                control,
                opcode,
                guard,
                operands,
                *effects,
            )
        )
    for index in range(len(found), len(words)):
        payload, control = encoding.decode(words[index])
        name = "NOP" if payload & _OPCODE_BITS == _NOP else "PADDING"
        found.append(
            Instruction(index, name, payload, control, name, None, (), (), (), (), frozenset())
        )
    return _glue(found)


def _glue(instructions: list[Instruction]) -> list[Instruction]:
    """Mark runs of ``@!PT LDS RZ, [RZ]`` and the instruction they stand before."""
    out = list(instructions)
    for at, instruction in enumerate(instructions):
        if instruction.never_executes and instruction.base == "LDS":
            out[at] = replace(out[at], glued=True)
            if at + 1 < len(out):
                out[at + 1] = replace(out[at + 1], glued=True)
    return out
