"""Distances to walls: a barrier and the like need some cycles before what follows may touch memory.

Found on hardware: a load that issues fewer than about five cycles after ``BAR.SYNC`` overtakes the
barrier, although nothing in the word says so.  Compilers keep a distance; so must a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.safety.latency import WALL_REACH, Floors

Near = dict[tuple[int, int], int]
"""(earlier, later) -> cycles, for pairs of which one is a wall, less than WALL_REACH apart."""


def near_walls(
    original: Function, candidate: Function, floors: Floors
) -> Iterator[tuple[Instruction, str]]:
    """Instructions that came closer to a wall than they were and than compilers allow."""
    by_index = {i.index: i for i in candidate.instructions}
    for block in candidate.blocks:
        before = _distances(original.instructions[block.start : block.end])
        after = _distances(candidate.instructions[block.start : block.end])
        for (a, b), cycles in after.items():
            first, second = by_index[a], by_index[b]
            if cycles >= before.get((a, b), WALL_REACH):
                continue
            if first.is_wall and cycles < (least := floors.after_wall(first, second)):
                yield second, f"issues {cycles} cycles after {first.text}; at least {least} needed"
            if second.is_wall and cycles < (least := floors.before_wall(first, second)):
                yield first, f"issues {cycles} cycles before {second.text}; at least {least} needed"


def _distances(order: Sequence[Instruction]) -> Near:
    """To every wall before an instruction, and to the next one after it."""
    found: Near = {}
    walls: list[tuple[int, Instruction]] = []
    since: list[tuple[int, Instruction]] = []
    now = 0
    for instruction in order:
        near = since if instruction.is_wall else []
        for at, earlier in (*walls, *near):
            if now - at < WALL_REACH:
                found[earlier.index, instruction.index] = now - at
        if instruction.is_wall:
            walls = [*walls[-WALL_REACH:], (now, instruction)]
            since = []
        else:
            since.append((now, instruction))
        now += instruction.control.stall
    return found
