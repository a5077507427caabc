"""Schedules with the smallest issue distances that the latency table permits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nostall.core.space import NO_TAGS
from nostall.sass.schedule.arrays import Int32Array
from nostall.sass.schedule.moves import SetStall
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule


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
