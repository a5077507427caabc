"""Mobility of a kernel: the number of instructions that can move, and why the others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nostall.core.space import NO_TAGS
from nostall.sass.schedule.arrays import Int32Array
from nostall.sass.schedule.moves import SetStall, Slide
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule


@dataclass(frozen=True)
class Mobility:
    """Counts of movable and pinned instructions in a kernel's start schedule."""

    total: int
    """All instructions."""
    movable: int
    """Instructions with at least one legal slide."""
    slides: int
    """Legal slides of all instructions."""
    pins: dict[str, int]
    """Cause -> number of instructions that it keeps from moving."""

    @property
    def share(self) -> float:
        """Share of the instructions that can move, 0 to 1."""
        return self.movable / self.total if self.total else 0.0


def mobility(space: ScheduleSpace) -> Mobility:
    """Try each slide of each instruction of the start schedule."""
    state = space.start()
    slides = [move for move in space.moves(state) if isinstance(move, Slide)]
    movable = {move.index for move in slides}
    pins: Counter[str] = Counter()
    for instruction in space.function.instructions:
        if instruction.index in movable:
            continue
        if instruction.index in space.function.pinned:
            pins["offset recorded in an unknown layout"] += 1
        elif instruction.index in space.function.frozen:
            pins["next to code that cannot be seen (calls)"] += 1
        elif not instruction.is_known_opcode:
            pins["opcode without a row"] += 1
        elif instruction.base == "NOP" or instruction.text == "NOP":
            pins["padding and NOP"] += 1
        elif instruction.is_barrier:
            pins["barrier, branch or asynchronous operation"] += 1
        else:
            pins["held by dependences and latencies"] += 1
    return Mobility(len(space.function.instructions), len(movable), len(slides), dict(pins))


def lower_stalls(
    space: ScheduleSpace, state: Schedule, order: Int32Array
) -> Iterator[tuple[Schedule, str]]:
    """Lower the stall of each instruction, in ``order``, to the least that is legal.

    The distances between instructions then are those of the latency table.  Yields each state with
    the move that led to it.
    """
    for index in order.tolist():
        for cycles in range(1, int(state.stall[index])):
            move = SetStall(index, cycles, NO_TAGS)
            after = space.apply_if_legal(state, move)
            if after is not None:
                state = after
                yield state, str(move)
                break


def tight_schedule(space: ScheduleSpace, moves: int, seed: int) -> Schedule:
    """The schedule after ``moves`` random legal moves, with the least legal stalls.

    The seed also chooses which stalls are lowered first: where several instructions protect one
    pair, the distance stays at one of them.
    """
    rng = np.random.default_rng(seed)
    state = space.start()
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is None:
            break
        state = space.apply(state, move)
    order = rng.permutation(len(space.function.instructions)).astype(np.int32)
    lowered = [after for after, _ in lower_stalls(space, state, order)]
    return lowered[-1] if lowered else state
