"""Is a block's order with its stalls legal?  The compiled inner loop of every proposal."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.schedule.graph import BlockGraph, Graph
from nostall.sass.schedule.state import Schedule

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class Broken(IntEnum):
    """The first rule that a block breaks; OK when none."""

    OK = 0
    DEPENDENCE = 1
    START = 2
    END = 3
    NEIGHBOURS = 4
    BOARD_GAP = 5


REASONS = {
    Broken.DEPENDENCE: "a dependent or protecting instruction would come too close, or first",
    Broken.START: "too close to the block's start for what is in flight there",
    Broken.END: "its result would still be in flight at the block's end, more than before",
    Broken.BOARD_GAP: "an instruction would wait for a scoreboard in the cycle after it is set",
    Broken.NEIGHBOURS: "two neighbours would issue closer than compilers ever let them",
}


@njit(cache=True)  # type: ignore[untyped-decorator]
def settle_block(
    order: Ints,
    stall: Bytes,
    repair: bool,
    start: int,
    into: Ints,
    first: Ints,
    cycles: Ints,
    after_start: Ints,
    before_end: Ints,
    pipe: Ints,
    gap: Ints,
    next_original: Ints,
    stall_original: Ints,
    yields: Bytes,
    write_sb: Bytes,
    read_sb: Bytes,
    wait: Bytes,
    drains: NDArray[np.bool_],
) -> int:
    """Check one block and, with ``repair``, raise stalls in place where they are too short.

    ``order``: original indices of the block's positions.  Edges into local instruction l are
    ``first`` / ``cycles`` [into[l] : into[l + 1]].  The other arrays are those of
    :class:`~nostall.sass.schedule.graph.BlockGraph`, ``Graph`` and ``Schedule``.  Returns a
    :class:`Broken`; stalls are raised to at most 11, or 15 with yield, and never from 0, which is
    no distance but a special wait.
    """
    n = len(order)
    issue = np.full(n, -1, np.int32)
    was_set = np.full(8, -16, np.int32)
    now = 0
    for p in range(n):
        index = order[p]
        need, why = now, 0
        local = index - start
        for e in range(into[local], into[local + 1]):
            at = issue[first[e]]
            if at < 0:
                return 1
            if at + cycles[e] > need:
                need, why = at + cycles[e], 1
        if after_start[local] > need:
            need, why = after_start[local], 2
        if p > 0:
            before = order[p - 1]
            least = gap[pipe[before], pipe[index]]
            unchanged = next_original[before] == index and stall[before] >= stall_original[before]
            if stall[before] < least and not unchanged and now - stall[before] + least > need:
                need, why = now - stall[before] + least, 4
        if wait[index] and not drains[index]:
            for board in range(6):
                if wait[index] >> board & 1 and was_set[board] + 2 > need:
                    need, why = was_set[board] + 2, 5
        if need > now:
            if not repair or p == 0:
                return why
            before = order[p - 1]
            raised = stall[before] + need - now
            if stall[before] == 0 or raised > (15 if yields[before] else 11):
                return why
            stall[before] = raised
            now = need
        issue[local] = now
        was_set[write_sb[index]] = now
        was_set[read_sb[index]] = now
        now += stall[index]
    short = 0
    for local in range(n):
        short = max(short, before_end[local] - (now - issue[local]))
    if short > 0:
        last = order[n - 1]
        if not repair or stall[last] == 0 or stall[last] + short > (15 if yields[last] else 11):
            return 3
        stall[last] += short
    return 0


def settled(
    graph: Graph, block: BlockGraph, state: Schedule, span: Ints, stall: Bytes, repair: bool = False
) -> Broken:
    """Check the order ``span`` of one block with the stalls ``stall`` and all else as in ``state``;
    with ``repair`` stalls that are too short are raised in place."""
    code = settle_block(
        span,
        stall,
        repair,
        *graph.rules(block),
        state.yields,
        state.write_sb,
        state.read_sb,
        state.wait,
        graph.drains,
    )
    return Broken(code)
