"""Distances that compilers left between instructions, where nothing but time could protect them.

Only straight-line code counts, and only pairs between which nothing waits: a wait lasts unknown
cycles, so a distance across one proves nothing.  What remains is a statement of the compiler that
the pair works at this distance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction
from nostall.sass.safety import pairing
from nostall.sass.safety.latency import WALL_REACH

HORIZON = 24
"""Cycles up to which register pairs are recorded."""

Sightings = Counter[tuple[str, str, str, int]]
"""(kind, exact name, coarse name, cycles) -> how often."""


@dataclass(slots=True)
class _Seen:
    at: int
    waits: int
    instruction: Instruction


@dataclass(slots=True)
class _Walk:
    now: int = 0
    waits: int = 0
    recent: list[_Seen] = field(default_factory=list[_Seen])
    writers: dict[int, list[_Seen]] = field(default_factory=dict[int, list[_Seen]])
    readers: dict[int, list[_Seen]] = field(default_factory=dict[int, list[_Seen]])


def sight(order: Sequence[Instruction], sm: int, found: Sightings) -> None:
    """Add what one block shows to ``found``."""
    walk = _Walk()
    for instruction in order:
        walk.waits += bool(instruction.control.wait or instruction.base == "DEPBAR")
        here = _Seen(walk.now, walk.waits, instruction)
        _walls(here, walk, found)
        _registers(here, walk, sm, found)
        walk.waits += instruction.is_wall
        walk.now += instruction.control.stall


def _walls(here: _Seen, walk: _Walk, found: Sightings) -> None:
    """Distances to walls; the wait of a wall itself lies before what follows it."""
    walk.recent = [s for s in walk.recent if here.at - s.at <= WALL_REACH]
    second = here.instruction
    for seen in walk.recent:
        first, cycles = seen.instruction, here.at - seen.at
        if first.is_wall:
            if seen.waits + 1 == here.waits:
                found["AFTER", *pairing.wall_pair(first, second), cycles] += 1
        elif seen.waits != here.waits:
            continue
        elif second.is_wall:
            found["BEFORE", *pairing.wall_pair(second, first), cycles] += 1
    walk.recent.append(here)


def _registers(here: _Seen, walk: _Walk, sm: int, found: Sightings) -> None:
    instruction = here.instruction
    for register in instruction.uses:
        for seen in walk.writers.get(register, ()):
            _pair("RAW", seen, here, register, found)
    for register in instruction.defs:
        for seen in walk.writers.get(register, ()):
            _pair("WAW", seen, here, register, found)
        for seen in walk.readers.get(register, ()):
            _pair("WAR", seen, here, register, found)
    fixed = instruction.row.fixed(sm)
    for register in instruction.defs:
        walk.writers[register] = [here] if fixed else []
        walk.readers[register] = []
    if fixed:
        for register in instruction.uses:
            walk.readers.setdefault(register, []).append(here)


def _pair(kind: pairing.Kind, first: _Seen, second: _Seen, register: int, found: Sightings) -> None:
    """A pair counts when the first surely executes if the second does."""
    guard = first.instruction.guard
    if guard is not None and guard != second.instruction.guard:
        return
    cycles = second.at - first.at
    if cycles > HORIZON or first.waits != second.waits:
        return
    one, two = first.instruction, second.instruction
    wide = pairing.coarse(one, two, register, kind)[1]
    for name in pairing.exact(one, two, register, kind):
        found[kind, name, wide, cycles] += 1
