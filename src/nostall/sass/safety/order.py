"""Register and memory dependences: the candidate's order must keep those of the original.

For each register and memory space a block is a sequence of *epochs*: a writer, and the readers
until the next writer.  Two orders keep all dependences (read after write, write after read, write
after write) exactly if all epochs are equal.  Scheduling barriers cut a block into segments that
must contain the same instructions.

Two loads of one shared location keep their order, too.  ``ld.relaxed`` and ``ld.volatile`` of
shared memory compile to plain LDS, and the second of two such reads must not return an older value
than the first (coherence of reads, PTX ISA, Memory Consistency Model).  Coherence orders the reads
of one thread, so two addresses with the same registers, unchanged between the loads, and other
constants are different locations.  All other addresses may be equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nostall.sass.program import registers
from nostall.sass.program.addresses import reads_shared_in_order, shared_address
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect
from nostall.sass.program.program import Function
from nostall.sass.safety.verdict import Finding

_SPACES = (
    (registers.COUNT, Effect.READ_GLOBAL, Effect.WRITE_GLOBAL),
    (registers.COUNT + 1, Effect.READ_SHARED, Effect.WRITE_SHARED),
    (registers.COUNT + 2, Effect.READ_LOCAL, Effect.WRITE_LOCAL),
)
_SPACE_NAMES = ("global memory", "shared memory", "local memory")

Accesses = dict[tuple[bool, int], tuple[int, frozenset[int]]]
"""Access of an instruction -> (index of the last writer, indices of the readers since then).

Keys are (whether it writes, resource).  A resource is a register number, or ``registers.COUNT``
plus the number of a memory space.  The readers matter for writes only.
"""


@dataclass(slots=True)
class _Epoch:
    """The last writer of a resource (-1: none in this block), and the readers since then."""

    writer: int = -1
    readers: set[int] = field(default_factory=set[int])


def order_findings(original: Function, candidate: Function) -> Iterator[Finding]:
    """A finding for each instruction of ``candidate`` whose position breaks a dependence."""
    for block in original.blocks:
        before = original.instructions[block.start : block.end]
        after = candidate.instructions[block.start : block.end]
        if [i.index for i in before] == [i.index for i in after]:
            continue
        yield from _crossed_barriers(candidate, block.start, before, after)
        yield from _changed_epochs(candidate, block.start, before, after)
        yield from _swapped_reads(candidate, block.start, before, after)


def _crossed_barriers(
    function: Function, start: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Iterator[Finding]:
    """Findings for the instructions that moved across a scheduling barrier."""
    original_segment = {
        i.index: segment for i, segment in zip(before, _segment_numbers(before), strict=True)
    }
    segments = _segment_numbers(after)
    for at, (instruction, segment) in enumerate(zip(after, segments, strict=True)):
        if original_segment[instruction.index] != segment:
            yield Finding(
                "wall-crossed",
                function.name,
                (start + at) * 16,
                instruction.text,
                "moved across a scheduling barrier (a barrier, fence, branch, asynchronous "
                "operation or similar); it must stay on the side where the original has it",
                "hazards",
            )


def _segment_numbers(order: Sequence[Instruction]) -> Iterator[int]:
    """Segment number of each instruction; each scheduling barrier is a segment of its own."""
    number = 0
    for instruction in order:
        number += instruction.is_barrier
        yield number
        number += instruction.is_barrier


def _changed_epochs(
    function: Function, start: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Iterator[Finding]:
    """Findings for the instructions whose writers or readers before them changed."""
    original_accesses, candidate_accesses = _accesses(before), _accesses(after)
    for at, instruction in enumerate(after):
        accesses = candidate_accesses[instruction.index]
        expected = original_accesses[instruction.index]
        if accesses != expected:
            access = next(a for a, epoch in accesses.items() if expected.get(a) != epoch)
            name = _access_name(*access)
            yield Finding(
                "order",
                function.name,
                (start + at) * 16,
                instruction.text,
                f"the {name} has another order than in the original; the instructions that write "
                "or read it must keep their order",
                "hazards",
            )


def _access_name(writes: bool, resource: int) -> str:
    """Text of an access for a finding."""
    space = resource - registers.COUNT
    name = _SPACE_NAMES[space] if space >= 0 else registers.name(resource)
    return f"{'write' if writes else 'read'} of {name}"


_NO_READERS: frozenset[int] = frozenset()


def _accesses(order: Sequence[Instruction]) -> dict[int, Accesses]:
    """The accesses of each instruction of a block, by original index."""
    epochs: dict[int, _Epoch] = defaultdict(_Epoch)
    by_index: dict[int, Accesses] = {}
    for instruction in order:
        accesses: Accesses = {}
        reads, writes = _resources(instruction)
        for resource in reads:
            accesses[False, resource] = (epochs[resource].writer, _NO_READERS)
        for resource in writes:
            epoch = epochs[resource]
            accesses[True, resource] = (epoch.writer, frozenset(epoch.readers))
        for resource in reads:
            epochs[resource].readers.add(instruction.index)
        for resource in writes:
            epochs[resource] = _Epoch(instruction.index)
        by_index[instruction.index] = accesses
    return by_index


def _resources(instruction: Instruction) -> tuple[Sequence[int], Sequence[int]]:
    """(resources read, resources written); a fence writes all memory spaces."""
    reads, writes, effects = instruction.uses, instruction.defs, instruction.effects
    if not effects & Effect.ACCESS:
        return reads, writes
    read_spaces: list[int] = []
    written_spaces: list[int] = []
    for space, read, write in _SPACES:
        if effects & Effect.FENCE or effects & write:
            written_spaces.append(space)
        elif effects & read:
            read_spaces.append(space)
    return (*reads, *read_spaces), (*writes, *written_spaces)


def _swapped_reads(
    function: Function, start: int, before: Sequence[Instruction], after: Sequence[Instruction]
) -> Iterator[Finding]:
    """Findings for loads that pass another one that may read the same shared location."""
    places = _read_places(before)
    if not places:
        return
    last_run = 0
    last_reader: dict[tuple[int, int], int] = {}
    for at, instruction in enumerate(after):
        place = places.get(instruction.index)
        if place is None:
            continue
        keys = [(place.run, byte) for byte in place.bytes]
        readers = [last_reader.get(key, -1) for key in keys]
        last_reader.update(dict.fromkeys(keys, instruction.index))
        last_run = max(last_run, place.run)
        if place.run < last_run or readers != place.readers:
            yield Finding(
                "read-order",
                function.name,
                (start + at) * 16,
                instruction.text,
                "passes another load that may read the same shared location; relaxed and volatile "
                "loads look like these and must keep their order",
                "hazards",
            )


@dataclass(frozen=True, slots=True)
class _ReadPlace:
    """Place of one load among the loads of a block that must keep their order."""

    run: int
    """Number of the run: neighbouring loads whose addresses have the same register values.  Runs
    keep their order, because different registers may give the same address."""
    bytes: range
    """The bytes that the load reads, relative to the registers."""
    readers: list[int]
    """For each byte: the load of the run that read it last before, by original index, or -1."""


def _read_places(order: Sequence[Instruction]) -> dict[int, _ReadPlace]:
    """The places of the shared loads of a block in its original order, by original index."""
    places: dict[int, _ReadPlace] = {}
    writers: dict[int, int] = {}
    run, previous = 0, None
    last_reader: dict[int, int] = {}
    for instruction in order:
        if reads_shared_in_order(instruction):
            address = shared_address(instruction)
            values = tuple((r, writers.get(r)) for r in sorted(instruction.address_registers))
            if previous != (address.base, values):
                run, previous = run + 1, (address.base, values)
                last_reader = {}
            readers = [last_reader.get(byte, -1) for byte in address.bytes]
            places[instruction.index] = _ReadPlace(run, address.bytes, readers)
            last_reader.update(dict.fromkeys(address.bytes, instruction.index))
        for register in instruction.defs:
            writers[register] = instruction.index
    return places
