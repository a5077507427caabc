"""Dependences that an order must keep, compared between original and candidate per block.

For every register and memory space a block is a sequence of *epochs*: a writer and the set of
readers until the next writer.  Two orders keep all dependences (read after write, write after
read, write after write) exactly when all epochs are equal.  Walls cut a block into segments that
must hold the same instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Does
from nostall.sass.program.program import Function
from nostall.sass.safety.verdict import Finding

_SPACES = (
    ("global", Does.READ_GLOBAL, Does.WRITE_GLOBAL),
    ("shared", Does.READ_SHARED, Does.WRITE_SHARED),
    ("local", Does.READ_LOCAL, Does.WRITE_LOCAL),
)


@dataclass(slots=True)
class _Epochs:
    """Per reader: the last writer before it; per writer: the writer and the readers before it."""

    writer: int = -1
    readers: set[int] = field(default_factory=set[int])


def order_findings(original: Function, candidate: Function) -> Iterator[Finding]:
    """Every instruction of ``candidate`` that stands in a wrong order."""
    for block in original.blocks:
        before = original.instructions[block.start : block.end]
        after = candidate.instructions[block.start : block.end]
        if [i.index for i in before] == [i.index for i in after]:
            continue
        yield from _crossed_walls(candidate, block.start, before, after)
        yield from _broken_epochs(candidate, block.start, before, after)


def _crossed_walls(
    function: Function, start: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Iterator[Finding]:
    home = _segments(before)
    for at, (instruction, segment) in enumerate(zip(after, _numbers(after), strict=True)):
        if home[instruction.index] != segment:
            yield Finding(
                "wall-crossed",
                function.name,
                (start + at) * 16,
                instruction.text,
                "moved across a barrier, fence, asynchronous group or other instruction that "
                "nothing may cross",
                "hazards",
            )


def _segments(order: Sequence[Instruction]) -> dict[int, int]:
    return {i.index: n for i, n in zip(order, _numbers(order), strict=True)}


def _numbers(order: Sequence[Instruction]) -> Iterator[int]:
    """Segment number of each instruction; each wall is a segment of its own."""
    number = 0
    for instruction in order:
        number += instruction.is_wall
        yield number
        number += instruction.is_wall


def _broken_epochs(
    function: Function, start: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Iterator[Finding]:
    wanted, found = _epochs(before), _epochs(after)
    for at, instruction in enumerate(after):
        mine, theirs = found[instruction.index], wanted[instruction.index]
        if mine != theirs:
            where = next((r for r, epoch in mine.items() if theirs.get(r) != epoch), "?")
            yield Finding(
                "order",
                function.name,
                (start + at) * 16,
                instruction.text,
                f"stands in another order than the original with respect to {where}",
                "hazards",
            )


def _epochs(order: Sequence[Instruction]) -> dict[int, dict[str, tuple[int, frozenset[int]]]]:
    """For each instruction and each resource: the writer before it, and (for writers) the readers
    since that writer."""
    state: dict[str, _Epochs] = defaultdict(_Epochs)
    out: dict[int, dict[str, tuple[int, frozenset[int]]]] = {}
    for instruction in order:
        mine: dict[str, tuple[int, frozenset[int]]] = {}
        reads, writes = _resources(instruction)
        for resource in reads:
            mine["read of " + resource] = (state[resource].writer, frozenset())
        for resource in writes:
            epoch = state[resource]
            mine["write of " + resource] = (epoch.writer, frozenset(epoch.readers))
        for resource in reads:
            state[resource].readers.add(instruction.index)
        for resource in writes:
            state[resource] = _Epochs(instruction.index)
        out[instruction.index] = mine
    return out


def _resources(instruction: Instruction) -> tuple[set[str], set[str]]:
    reads = {registers.name(r) for r in instruction.uses}
    writes = {registers.name(r) for r in instruction.defs}
    does = instruction.does
    for space, read, write in _SPACES:
        if does & Does.FENCE or does & write:
            writes.add(f"{space} memory")
        elif does & read:
            reads.add(f"{space} memory")
    return reads, writes
