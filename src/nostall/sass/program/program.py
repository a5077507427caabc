"""A cubin as a program: functions whose instructions can be reordered and re-timed in place."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.core import garbage_collector
from nostall.core.errors import BadBinary, BadInput
from nostall.core.text.suggest import did_you_mean, listed
from nostall.sass.binary import encoding
from nostall.sass.binary.cubin import Cubin, TextSection
from nostall.sass.binary.encoding import WORD_BYTES
from nostall.sass.binary.listing import Listing, disassemble
from nostall.sass.program.blocks import Block, build_blocks, falls_through
from nostall.sass.program.defuse import def_use
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.program.opcodes import UNREACHED

_NOP = 0x7918
_OPCODE_BITS = (1 << 16) - 1


@dataclass(frozen=True)
class Function:
    """One function of a cubin: an entry kernel or a device function."""

    name: str
    text: TextSection
    instructions: tuple[Instruction, ...]
    """In their present order; ``Instruction.index`` is the original position."""
    blocks: tuple[Block, ...]
    """Ranges of positions.  They never change, because instructions move only inside a block."""

    @property
    def is_kernel(self) -> bool:
        """Whether the function is an entry point."""
        return self.text.is_kernel

    @cached_property
    def block_numbers(self) -> tuple[int, ...]:
        """The block number of each position."""
        return tuple(i for i, block in enumerate(self.blocks) for _ in range(len(block)))

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Original indices of instructions that unreadable records may name; they must not move."""
        return frozenset(offset // WORD_BYTES for offset in self.text.pinned)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Original indices of instructions that must neither move nor change.

        Their blocks adjoin code outside this function's graph, and what that code relies on is
        unknown.
        """
        blocks = (range(b.start, b.end) for b in self.blocks if b.adjoins_unknown_code)
        return frozenset(index for block in blocks for index in block)

    def reordered(self, order: Sequence[Instruction]) -> Function:
        """A copy with its instructions in another order or with other control words.

        Raises :class:`BadInput` if ``order`` is not a permutation of the instructions.
        """
        if sorted(i.index for i in order) != list(range(len(self.instructions))):
            raise BadInput(
                f"{self.name}: the new order is not a permutation of its "
                f"{len(self.instructions)} instructions; each must appear exactly once"
            )
        return replace(self, instructions=tuple(order))


@dataclass(frozen=True)
class Program:
    """All functions of a cubin.  ``to_cubin`` is the inverse of ``from_cubin`` if nothing moves."""

    cubin: Cubin
    functions: tuple[Function, ...]

    @classmethod
    def from_cubin(cls, data: bytes) -> Program:
        """Parse a cubin, disassemble it and build its basic blocks.

        Raises :class:`~nostall.core.errors.BadBinary` if the cubin is damaged,
        :class:`~nostall.core.errors.UnsupportedArchitecture` if it is for another architecture,
        and :class:`~nostall.core.errors.MissingPart` if nvdisasm is not installed.
        """
        cubin = Cubin.parse(data)
        with garbage_collector.paused():
            return cls.from_listings(cubin, disassemble(cubin))

    @classmethod
    def of_kernel(cls, data: bytes, name: str) -> Program:
        """Parse one kernel of a cubin; the other functions are not disassembled.

        Raises the errors of :meth:`from_cubin`.
        """
        cubin = Cubin.parse(data)
        texts = tuple(text for text in cubin.texts if text.name == name)
        if not texts:
            raise _no_kernel(name, [text.name for text in cubin.texts if text.is_kernel])
        with garbage_collector.paused():
            listings = disassemble(cubin, {name})
            return cls(cubin, tuple(_build_function(cubin, text, listings) for text in texts))

    @classmethod
    def from_listings(cls, cubin: Cubin, listings: Mapping[str, Listing]) -> Program:
        """Build a program from nvdisasm's listing of each function of a cubin, by its name.

        Raises :class:`~nostall.core.errors.BadBinary` if a listing is not that of its function.
        """
        return cls(cubin, tuple(_build_function(cubin, text, listings) for text in cubin.texts))

    @property
    def sm(self) -> int:
        """Architecture number, such as 90."""
        return self.cubin.sm

    @property
    def kernels(self) -> tuple[Function, ...]:
        """The entry functions."""
        return tuple(f for f in self.functions if f.is_kernel)

    def function(self, name: str) -> Function:
        """The function called ``name``; raises :class:`BadInput` if there is none."""
        for function in self.functions:
            if function.name == name:
                return function
        names = [function.name for function in self.functions]
        raise BadInput(f"no function {name!r}; the cubin has: {listed(names)}")

    def kernel(self, name: str | None = None) -> Function:
        """The kernel called ``name``; without a name, the only kernel.

        Raises :class:`BadInput` if there is no such kernel, or several without a name.
        """
        names = [f.name for f in self.kernels]
        if name is None and len(names) == 1:
            return self.kernels[0]
        if name is None or name not in names:
            raise _no_kernel(name, names)
        return self.function(name)

    def with_function(self, changed: Function) -> Program:
        """A copy of the program in which ``changed`` replaces the function of the same name."""
        return replace(
            self,
            functions=tuple(changed if f.name == changed.name else f for f in self.functions),
        )

    def to_cubin(self) -> bytes:
        """The cubin: all words re-encoded, and recorded offsets adapted to the new positions."""
        data = bytearray(self.cubin.data)
        for function in self.functions:
            _write_function(function, data)
        return bytes(data)


def _write_function(function: Function, data: bytearray) -> None:
    """Write the words of a function, and the records that name its instructions, into ``data``."""
    text = function.text
    position = {ins.index: at for at, ins in enumerate(function.instructions)}
    for at, instruction in enumerate(function.instructions):
        word = encoding.encode(instruction.payload, instruction.control)
        start = text.file_offset + at * WORD_BYTES
        data[start : start + WORD_BYTES] = word.to_bytes(WORD_BYTES, "little")
    for record in text.records:
        if not record.is_branch_target:
            index, byte = divmod(record.offset, WORD_BYTES)
            offset = position[index] * WORD_BYTES + byte
            start = record.file_offset
            data[start : start + record.width] = offset.to_bytes(record.width, "little")


def _build_function(cubin: Cubin, text: TextSection, listings: Mapping[str, Listing]) -> Function:
    listing = listings.get(text.name)
    if listing is None:
        raise BadBinary(
            f"nvdisasm printed nothing for section .text.{text.name}; the file may be damaged, or "
            f"this nvdisasm may not support sm_{cubin.sm}"
        )
    code = cubin.data[text.file_offset : text.file_offset + text.size]
    words = [lo | hi << 64 for lo, hi in struct.iter_unpack("<QQ", code)]
    instructions = tuple(_decode_instructions(text, listing, words))
    labels = {name: offset // WORD_BYTES for name, offset in listing.labels.items()}
    targets = sorted({r.offset // WORD_BYTES for r in text.records if r.is_branch_target})
    entries = [offset // WORD_BYTES for offset, _ in text.entries]
    blocks = build_blocks(instructions, labels, entries, targets, text.is_kernel)
    return Function(text.name, text, instructions, blocks)


def _decode_instructions(
    text: TextSection, listing: Listing, words: list[int]
) -> Iterable[Instruction]:
    """One instruction for each word: the rows of the listing, unreached words, then padding."""
    if len(listing.rows) > len(words):
        raise BadBinary(
            f".text.{text.name}: nvdisasm lists {len(listing.rows)} instructions, but the section "
            f"has {len(words)} words"
        )
    instructions: list[Instruction] = []
    for row in listing.rows:
        index = len(instructions)
        if row.offset > index * WORD_BYTES and row.offset % WORD_BYTES == 0:
            instructions += _unreached(text, instructions, words, row.offset)
            index = len(instructions)
        if row.offset != index * WORD_BYTES or row.word != words[index]:
            raise BadBinary(
                f".text.{text.name}: nvdisasm's row at {row.offset:#x} does not agree with the "
                f"file's bytes at {index * WORD_BYTES:#x}"
            )
        guard, opcode, operands = parse_text(row.text)
        base = opcode.partition(".")[0]
        payload, control = encoding.decode(row.word)
        registers = def_use(row, guard, base, operands)
        instructions.append(
            Instruction(
                index,
                row.text,
                payload,
                control,
                opcode,
                guard,
                operands,
                *registers,
            )
        )
    for index in range(len(instructions), len(words)):
        payload, _ = encoding.decode(words[index])
        name = "NOP" if payload & _OPCODE_BITS == _NOP else "PADDING"
        instructions.append(_opaque(index, words[index], name))
    return _mark_dummy_loads(instructions)


def _unreached(
    text: TextSection, before: Sequence[Instruction], words: Sequence[int], end: int
) -> list[Instruction]:
    """Instructions for words up to the offset ``end`` that nvdisasm does not list.

    It leaves out what control does not reach.  Raises :class:`BadBinary` if control might.
    """
    start = len(before) * WORD_BYTES
    targets = [r.offset for r in text.records if r.is_branch_target]
    is_target = any(start <= at < end for at in (*targets, *(at for at, _ in text.entries)))
    if is_target or not before or falls_through(before[-1]):
        raise BadBinary(
            f".text.{text.name}: nvdisasm does not list the instructions from {start:#x} to "
            f"{end:#x}, although control may reach them; the file may be damaged, or is code for "
            "debuggers: compile it without -G"
        )
    indices = range(len(before), min(end // WORD_BYTES, len(words)))
    return [_opaque(index, words[index], UNREACHED) for index in indices]


def _opaque(index: int, word: int, name: str) -> Instruction:
    """An instruction without a row in the listing."""
    payload, control = encoding.decode(word)
    return Instruction(index, name, payload, control, name, None, (), (), (), (), frozenset())


def _mark_dummy_loads(instructions: list[Instruction]) -> list[Instruction]:
    """Make runs of ``@!PT LDS RZ, [RZ]``, and the instruction after each, scheduling barriers."""
    marked = list(instructions)
    for at, instruction in enumerate(instructions):
        if instruction.never_executes and instruction.base == "LDS":
            marked[at] = replace(marked[at], acts_as_barrier=True)
            if at + 1 < len(marked):
                marked[at + 1] = replace(marked[at + 1], acts_as_barrier=True)
    return marked


def _no_kernel(name: str | None, names: list[str]) -> BadInput:
    problem = "no kernel was named" if name is None else f"no kernel {name!r}"
    near = did_you_mean(name, names) if name is not None else ""
    return BadInput(f"{problem}; the cubin has: {listed(names)}{near}")
