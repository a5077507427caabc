"""Violations of content: other instructions, other operands, other bytes outside the code."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from nostall.sass.binary import encoding
from nostall.sass.program import Function, Program
from tests.mutations.edits import ALU, FENCES, Edit, mutation

_WORD = 16
_REGCOUNT, _FRAME_SIZE, _MIN_STACK = 0x2F, 0x11, 0x12
_STORES = ("STG", "STS", "STL", "RED", "ATOMS")


def _word(function: Function, at: int, payload: int | None = None) -> bytes:
    instruction = function.instructions[at]
    chosen = instruction.payload if payload is None else payload
    return encoding.encode(chosen, instruction.control).to_bytes(_WORD, "little")


def _place(function: Function, at: int) -> int:
    return function.text.at + at * _WORD


def _lost_store(_: Program, function: Function) -> Iterator[Edit]:
    """A store replaced by a NOP."""
    nops = [i.payload for i in function.instructions if i.base == "NOP"]
    for at, instruction in enumerate(function.instructions):
        if instruction.base in _STORES and nops:
            yield Edit(patches={_place(function, at): _word(function, at, nops[-1])})


def _duplicate(_: Program, function: Function) -> Iterator[Edit]:
    """An instruction replaced by a copy of its neighbour."""
    for at in range(len(function.instructions) - 1):
        here, after = function.instructions[at], function.instructions[at + 1]
        if here.payload != after.payload and not {here.base, after.base} & FENCES:
            yield Edit(patches={_place(function, at): _word(function, at + 1)})


def _between_blocks(_: Program, function: Function) -> Iterator[Edit]:
    """Two instructions of different blocks exchanged."""
    for block in function.blocks[1:]:
        at, other = block.start, block.start - 2
        if other < 0 or function.block_of[other] == function.block_of[at]:
            continue
        if function.instructions[at].payload != function.instructions[other].payload:
            yield Edit(
                patches={
                    _place(function, at): _word(function, other),
                    _place(function, other): _word(function, at),
                }
            )


def _immediate(_: Program, function: Function) -> Iterator[Edit]:
    """One bit of an immediate operand flipped."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base in ALU and instruction.payload >> 9 & 7 == 4:
            flipped = instruction.payload ^ 1 << 32 + at % 16
            yield Edit(patches={_place(function, at): _word(function, at, flipped)})


def _register(_: Program, function: Function) -> Iterator[Edit]:
    """One bit of a destination register flipped."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base in ALU and any(r < 256 for r in instruction.defs):
            flipped = instruction.payload ^ 1 << 16
            yield Edit(patches={_place(function, at): _word(function, at, flipped)})


def _counted(_: Program, function: Function) -> Iterator[Edit]:
    """DEPBAR lets another number of groups be unfinished."""
    for at, instruction in enumerate(function.instructions):
        if instruction.base == "DEPBAR":
            for bit in (38, 39):
                flipped = instruction.payload ^ 1 << bit
                yield Edit(patches={_place(function, at): _word(function, at, flipped)})


def _stale_record(program: Program, function: Function) -> Iterator[Edit]:
    """A recorded instruction moved, its record left as it was."""
    recorded = {r.offset // _WORD: r for r in function.text.records if not r.fixed}
    for index, record in recorded.items():
        other = index + 1
        if other in recorded or other >= len(function.instructions):
            continue
        first, second = function.instructions[index], function.instructions[other]
        if function.block_of[index] != function.block_of[other] or first.payload == second.payload:
            continue
        if second.base in FENCES:
            continue
        old = program.cubin.data[record.at : record.at + record.width]
        yield Edit(move=(index, other), patches={record.at: old})


def _wrong_record(program: Program, function: Function) -> Iterator[Edit]:
    """A record that names the next instruction, though nothing moved."""
    for record in function.text.records:
        if not record.fixed:
            changed = (record.offset + _WORD).to_bytes(record.width, "little")
            yield Edit(patches={record.at: changed})


def _declared(program: Program, _: Function) -> Iterator[Edit]:
    """The declared number of registers or the stack size changed."""
    data = program.cubin.data
    for code in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK):
        start = 0
        while (found := data.find(bytes((4, code, 8, 0)), start)) >= 0:
            (value,) = struct.unpack_from("<I", data, found + 8)
            yield Edit(patches={found + 8: struct.pack("<I", value + 8)})
            start = found + 4


CONTENTS = {
    "store lost": mutation(_lost_store),
    "instruction duplicated": mutation(_duplicate),
    "exchanged between blocks": mutation(_between_blocks),
    "immediate changed": mutation(_immediate),
    "register changed": mutation(_register),
    "counted wait changed": mutation(_counted),
    "record left behind": mutation(_stale_record),
    "record without a move": mutation(_wrong_record),
    "declared resources changed": mutation(_declared),
}
