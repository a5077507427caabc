"""Content violations: changed instructions or operands, or changed bytes outside the code."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nostall.sass.binary import encoding
from nostall.sass.program import Function, Program
from tests.mutations.edits import ALU, BARRIERS, Edit, mutation

_WORD = 16
_REGCOUNT, _FRAME_SIZE, _MIN_STACK = 0x2F, 0x11, 0x12
_STORES = ("STG", "STS", "STL", "RED", "ATOMS")


def _word(function: Function, at: int, payload: int | None = None) -> bytes:
    """The instruction word at a position, with another payload if one is passed."""
    instruction = function.instructions[at]
    chosen = instruction.payload if payload is None else payload
    return encoding.encode(chosen, instruction.control).to_bytes(_WORD, "little")


def _file_position(function: Function, at: int) -> int:
    return function.text.file_offset + at * _WORD


def _lost_store(_: Program, function: Function) -> Iterator[Edit]:
    """A NOP replaces a store."""
    nops = [i.payload for i in function.instructions if i.base == "NOP"]
    for at, instruction in enumerate(function.instructions):
        if instruction.base in _STORES and nops:
            yield Edit(patches={_file_position(function, at): _word(function, at, nops[-1])})


def _duplicated_instruction(_: Program, function: Function) -> Iterator[Edit]:
    """A copy of its neighbour replaces an instruction."""
    for at in range(len(function.instructions) - 1):
        first, second = function.instructions[at], function.instructions[at + 1]
        if first.payload != second.payload and not {first.base, second.base} & BARRIERS:
            yield Edit(patches={_file_position(function, at): _word(function, at + 1)})


def _exchange_between_blocks(_: Program, function: Function) -> Iterator[Edit]:
    """Two instructions of different blocks are exchanged."""
    for block in function.blocks[1:]:
        at, other = block.start, block.start - 2
        if other < 0 or function.block_numbers[other] == function.block_numbers[at]:
            continue
        if function.instructions[at].payload != function.instructions[other].payload:
            yield Edit(
                patches={
                    _file_position(function, at): _word(function, other),
                    _file_position(function, other): _word(function, at),
                }
            )


def _changed_immediate(_: Program, function: Function) -> Iterator[Edit]:
    """One bit of an immediate operand is flipped."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base in ALU and instruction.payload >> 9 & 7 == 4:
            flipped = instruction.payload ^ 1 << 32 + at % 16
            yield Edit(patches={_file_position(function, at): _word(function, at, flipped)})


def _changed_register(_: Program, function: Function) -> Iterator[Edit]:
    """One bit of a destination register number is flipped."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base in ALU and any(r < 256 for r in instruction.defs):
            flipped = instruction.payload ^ 1 << 16
            yield Edit(patches={_file_position(function, at): _word(function, at, flipped)})


def _depbar_count(_: Program, function: Function) -> Iterator[Edit]:
    """The count of a DEPBAR, which lets so many groups be unfinished, changes."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base == "DEPBAR":
            for bit in (38, 39):
                flipped = instruction.payload ^ 1 << bit
                yield Edit(patches={_file_position(function, at): _word(function, at, flipped)})


def _stale_record(program: Program, function: Function) -> Iterator[Edit]:
    """An instruction with a recorded offset moves, but its record does not change."""
    recorded = {r.offset // _WORD: r for r in function.text.records if not r.is_branch_target}
    for index, record in recorded.items():
        other = index + 1
        if other in recorded or other >= len(function.instructions):
            continue
        first, second = function.instructions[index], function.instructions[other]
        if (
            function.block_numbers[index] != function.block_numbers[other]
            or first.payload == second.payload
        ):
            continue
        if second.base in BARRIERS:
            continue
        old = program.cubin.data[record.file_offset : record.file_offset + record.width]
        yield Edit(move=(index, other), patches={record.file_offset: old})


def _wrong_record(program: Program, function: Function) -> Iterator[Edit]:
    """A record names the next instruction although nothing moves."""
    for record in function.text.records:
        if not record.is_branch_target:
            changed = (record.offset + _WORD).to_bytes(record.width, "little")
            yield Edit(patches={record.file_offset: changed})


def _declared_resources(program: Program, _: Function) -> Iterator[Edit]:
    """The declared number of registers, or the stack size, changes."""
    data = program.cubin.data
    for code in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK):
        start = 0
        while (position := data.find(bytes((4, code, 8, 0)), start)) >= 0:
            (value,) = struct.unpack_from("<I", data, position + 8)
            yield Edit(patches={position + 8: struct.pack("<I", value + 8)})
            start = position + 4


CONTENTS = {
    "store lost": mutation(_lost_store),
    "instruction duplicated": mutation(_duplicated_instruction),
    "exchanged between blocks": mutation(_exchange_between_blocks),
    "immediate changed": mutation(_changed_immediate),
    "register changed": mutation(_changed_register),
    "counted wait changed": mutation(_depbar_count),
    "record left behind": mutation(_stale_record),
    "record without a move": mutation(_wrong_record),
    "declared resources changed": mutation(_declared_resources),
}
