"""Issue distances between scheduling barriers and the instructions around them.

Measured on hardware: a load that issues fewer than about five cycles after ``BAR.SYNC`` overtakes
the barrier, although no scoreboard or wait of either instruction shows this.  Compilers keep a
distance, and a candidate schedule must keep it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.safety.latency import BARRIER_REACH, LatencyTable

Distances = dict[tuple[int, int], int]
"""(earlier, later) index -> cycles, for pairs with a barrier less than BARRIER_REACH apart."""


def short_barrier_distances(
    original: Function, candidate: Function, table: LatencyTable
) -> Iterator[tuple[Instruction, str]]:
    """Instructions that are closer to a barrier than originally and than compilers allow.

    Yields (instruction, reason).
    """
    by_index = {i.index: i for i in candidate.instructions}
    for block in candidate.blocks:
        before = _barrier_distances(original.instructions[block.start : block.end])
        after = _barrier_distances(candidate.instructions[block.start : block.end])
        for (a, b), cycles in after.items():
            first, second = by_index[a], by_index[b]
            if cycles >= before.get((a, b), BARRIER_REACH):
                continue
            if first.is_barrier:
                required = table.min_distance_after_barrier(first, second)
                if cycles < required:
                    yield second, _reason(cycles, "after", first, required)
            if second.is_barrier:
                required = table.min_distance_before_barrier(first, second)
                if cycles < required:
                    yield first, _reason(cycles, "before", second, required)


def _reason(cycles: int, relation: str, barrier: Instruction, required: int) -> str:
    return f"issues {cycles} cycles {relation} {barrier.text}; at least {required} are required"


def _barrier_distances(order: Sequence[Instruction]) -> Distances:
    """Distances of each instruction to all barriers before it and to the next one after it."""
    distances: Distances = {}
    barriers: list[tuple[int, Instruction]] = []
    since_barrier: list[tuple[int, Instruction]] = []
    now = 0
    for instruction in order:
        near = since_barrier if instruction.is_barrier else []
        for issued, earlier in (*barriers, *near):
            if now - issued < BARRIER_REACH:
                distances[earlier.index, instruction.index] = now - issued
        if instruction.is_barrier:
            barriers = [*barriers[-BARRIER_REACH:], (now, instruction)]
            since_barrier = []
        else:
            since_barrier.append((now, instruction))
        now += instruction.control.stall
    return distances
