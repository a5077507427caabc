"""Count the issue distances that compilers left between instructions with no other protection.

Only straight-line code counts, and only pairs with no wait between them.  A wait lasts an unknown
number of cycles, so a distance across a wait proves nothing.  For the other pairs the compiler
relied on the distance alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction
from nostall.sass.safety import pairing
from nostall.sass.safety.latency import BARRIER_REACH

HORIZON = 24
"""Cycles up to which distances between register accesses are counted."""

Sightings = Counter[tuple[str, str, str, int]]
"""(kind of pair, exact name, coarse name, distance in cycles) -> number of occurrences."""


@dataclass(slots=True)
class _Issue:
    """The issue of one instruction."""

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


def count_distances(order: Sequence[Instruction], sm: int, sightings: Sightings) -> None:
    """Add the distances in one block, whose instructions are ``order``, to ``sightings``."""
    state = _BlockState()
    for instruction in order:
        state.waits += bool(instruction.control.wait or instruction.base == "DEPBAR")
        issue = _Issue(state.cycle, state.waits, instruction)
        _count_barrier_pairs(issue, state, sightings)
        _count_register_pairs(issue, state, sm, sightings)
        state.waits += instruction.is_barrier
        state.cycle += instruction.control.stall


def _count_barrier_pairs(second: _Issue, state: _BlockState, sightings: Sightings) -> None:
    """Count distances from and to scheduling barriers.

    A barrier counts as one wait itself, after its own issue.
    """
    state.recent = [issue for issue in state.recent if second.cycle - issue.cycle <= BARRIER_REACH]
    later = second.instruction
    for first in state.recent:
        earlier, cycles = first.instruction, second.cycle - first.cycle
        if earlier.is_barrier:
            if first.waits + 1 == second.waits:
                sightings["AFTER", *pairing.barrier_pair(earlier, later), cycles] += 1
        elif first.waits != second.waits:
            continue
        elif later.is_barrier:
            sightings["BEFORE", *pairing.barrier_pair(later, earlier), cycles] += 1
    state.recent.append(second)


def _count_register_pairs(
    second: _Issue, state: _BlockState, sm: int, sightings: Sightings
) -> None:
    """Count distances to earlier fixed-latency accesses of the same registers."""
    instruction = second.instruction
    for register in instruction.uses:
        for first in state.writers.get(register, ()):
            _count_pair("RAW", first, second, register, sightings)
    for register in instruction.defs:
        for first in state.writers.get(register, ()):
            _count_pair("WAW", first, second, register, sightings)
        for first in state.readers.get(register, ()):
            _count_pair("WAR", first, second, register, sightings)
    has_fixed_latency = instruction.has_fixed_latency(sm)
    for register in instruction.defs:
        state.writers[register] = [second] if has_fixed_latency else []
        state.readers[register] = []
    if has_fixed_latency:
        for register in instruction.uses:
            state.readers.setdefault(register, []).append(second)


def _count_pair(
    kind: pairing.HazardKind, first: _Issue, second: _Issue, register: int, sightings: Sightings
) -> None:
    """Count a pair if its first instruction executes whenever its second one does."""
    guard = first.instruction.guard
    if guard is not None and guard != second.instruction.guard:
        return
    cycles = second.cycle - first.cycle
    if cycles > HORIZON or first.waits != second.waits:
        return
    producer, consumer = first.instruction, second.instruction
    coarse_name = pairing.coarse_names(producer, consumer, register, kind)[1]
    for name in pairing.exact_names(producer, consumer, register, kind):
        sightings[kind, name, coarse_name, cycles] += 1
