"""Find the issue distances that compilers left between instructions with no other protection.

Only straight-line code counts, and only pairs with no wait between them.  A wait lasts an unknown
number of cycles, so a distance across a wait proves nothing.  For the other pairs the compiler
relied on the distance alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nostall.sass.binary.encoding import Control
from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety import pairing
from nostall.sass.safety.latency import BARRIER_REACH

HORIZON = 24
"""Cycles up to which distances between register accesses are counted."""

MATRIX_HORIZON = 40
"""The same for accesses by matrix instructions, whose results take up to 35 cycles."""

BarrierSide = Literal["AFTER", "BEFORE"]
"""Whether an instruction is after or before a scheduling barrier."""

Sightings = Counter[tuple[str, str, str, int]]
"""(kind of pair, exact name, coarse name, distance in cycles) -> number of occurrences."""


class Sighting(NamedTuple):
    """Two instructions whose order only their issue distance keeps."""

    kind: pairing.HazardKind | BarrierSide
    first: Instruction
    """The earlier instruction; the barrier for AFTER and BEFORE."""
    second: Instruction
    register: int
    """The register that both access; -1 for AFTER and BEFORE."""
    cycles: int


@dataclass(slots=True)
class _Issue:
    """The issue of one instruction."""

    position: int
    cycle: int
    """Cycles since the start of the block."""
    waits: int
    """Waits in the block so far, its own included."""
    instruction: Instruction


@dataclass(slots=True)
class _BlockState:
    """Earlier issues of a block that later instructions can form a pair with."""

    cycle: int = 0
    waits: int = 0
    recent: list[_Issue] = field(default_factory=list[_Issue])
    """Issues of the last BARRIER_REACH cycles."""
    writers: dict[int, list[_Issue]] = field(default_factory=dict[int, list[_Issue]])
    """Register -> its last writer, if that has fixed latency."""
    readers: dict[int, list[_Issue]] = field(default_factory=dict[int, list[_Issue]])
    """Register -> its fixed-latency readers since the last write."""
    predicate_writes: dict[int, int] = field(default_factory=dict[int, int])
    """Predicate -> position of the last instruction that writes it."""


def count_distances(order: Sequence[Instruction], sm: int, sightings: Sightings) -> None:
    """Add the distances in one block, whose instructions are ``order``, to ``sightings``."""
    for kind, first, second, register, cycles in find_sightings(
        ((i, i.control) for i in order), sm
    ):
        if kind == "AFTER" or kind == "BEFORE":
            sightings[kind, *pairing.barrier_pair(first, second), cycles] += 1
            continue
        coarse_name = pairing.coarse_names(first, second, register, kind)[1]
        for name in pairing.exact_names(first, second, register, kind):
            sightings[kind, name, coarse_name, cycles] += 1


def find_sightings(block: Iterable[tuple[Instruction, Control]], sm: int) -> Iterator[Sighting]:
    """The pairs in one block; ``block`` has each instruction with its control word."""
    state = _BlockState()
    for position, (instruction, control) in enumerate(block):
        state.waits += bool(control.wait or instruction.base == "DEPBAR")
        issue = _Issue(position, state.cycle, state.waits, instruction)
        if not instruction.never_executes:
            yield from _barrier_pairs(issue, state)
            yield from _register_pairs(issue, state, sm)
        # A barrier and the DRAIN form wait for an unknown time after their own issue.
        state.waits += bool(instruction.is_barrier or control.stall == 0)
        state.cycle += control.stall


def _barrier_pairs(second: _Issue, state: _BlockState) -> Iterator[Sighting]:
    """The pairs of an instruction with a scheduling barrier.

    A barrier counts as one wait itself, after its own issue.
    """
    state.recent = [issue for issue in state.recent if second.cycle - issue.cycle <= BARRIER_REACH]
    later = second.instruction
    for first in state.recent:
        earlier, cycles = first.instruction, second.cycle - first.cycle
        if earlier.is_barrier:
            if first.waits + 1 == second.waits:
                yield Sighting("AFTER", earlier, later, -1, cycles)
        elif later.is_barrier and first.waits == second.waits:
            yield Sighting("BEFORE", later, earlier, -1, cycles)
    state.recent.append(second)


def _register_pairs(second: _Issue, state: _BlockState, sm: int) -> Iterator[Sighting]:
    """The pairs of an instruction with fixed-latency accesses of the same registers."""
    instruction = second.instruction
    for register in instruction.uses:
        for first in state.writers.get(register, ()):
            if _counts(first, second, state):
                cycles = second.cycle - first.cycle
                yield Sighting("RAW", first.instruction, instruction, register, cycles)
    for register in instruction.defs:
        for kind, accesses in (("WAW", state.writers), ("WAR", state.readers)):
            for first in accesses.get(register, ()):
                if _counts(first, second, state):
                    cycles = second.cycle - first.cycle
                    yield Sighting(kind, first.instruction, instruction, register, cycles)  # type: ignore[arg-type]
    has_fixed_latency = instruction.has_fixed_latency(sm)
    for register in instruction.defs:
        state.writers[register] = [second] if has_fixed_latency else []
        state.readers[register] = []
        if registers.is_predicate(register):
            state.predicate_writes[register] = second.position
    if has_fixed_latency:
        for register in instruction.uses:
            state.readers.setdefault(register, []).append(second)


def _counts(first: _Issue, second: _Issue, state: _BlockState) -> bool:
    """Whether only the distance protects a pair.

    The first instruction must execute whenever the second one does: it has no guard, or the two
    have the same guard, whose predicate does not change between them.
    """
    is_matrix = first.instruction.pipe is Pipe.MMA
    horizon = MATRIX_HORIZON if is_matrix else HORIZON
    if second.cycle - first.cycle > horizon or first.waits != second.waits:
        return False
    guard = first.instruction.guard
    if guard is None:
        return True
    return guard == second.instruction.guard and all(
        state.predicate_writes.get(register, -1) < first.position
        for register in first.instruction.guard_registers
    )
