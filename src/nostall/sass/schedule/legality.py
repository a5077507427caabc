"""Legality check of one block's order and stall counts, compiled: the inner loop of each draw."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.sass.schedule.arrays import BoolArray, Int32Array, UInt8Array
from nostall.sass.schedule.graph import BlockGraph
from nostall.sass.schedule.state import Schedule


class Violation(IntEnum):
    """The first constraint that a block violates; NONE for a legal block."""

    NONE = 0
    DEPENDENCE = 1
    START = 2
    END = 3
    NEIGHBOURS = 4
    SCOREBOARD_GAP = 5


VIOLATION_TEXTS = {
    Violation.DEPENDENCE: (
        "an instruction would come before, or too close after, another that it depends on or that "
        "protects it"
    ),
    Violation.START: (
        "the instruction would come too close to the block's start for what is in flight there"
    ),
    Violation.END: (
        "the result would be in flight for longer after the block's end than in the original"
    ),
    Violation.SCOREBOARD_GAP: (
        "an instruction would wait for a scoreboard in the cycle after it is set"
    ),
    Violation.NEIGHBOURS: "two neighbours would issue closer than compilers ever place them",
}


class ControlArrays(NamedTuple):
    """Control fields of a schedule that no slide changes, by original index."""

    yields: UInt8Array
    write_sb: UInt8Array
    read_sb: UInt8Array
    wait: UInt8Array


@njit(cache=True)  # type: ignore[untyped-decorator]
def max_stall(yields: int) -> int:
    """The largest stall count that can be encoded with this yield flag."""
    return 15 if yields else 11


@njit(cache=True)  # type: ignore[untyped-decorator]
def check_block_arrays(
    order: Int32Array,
    stall: UInt8Array,
    repair: bool,
    start: int,
    edge_offsets: Int32Array,
    edge_first: Int32Array,
    edge_cycles: Int32Array,
    after_start: Int32Array,
    before_end: Int32Array,
    pipe: Int32Array,
    gap: Int32Array,
    next_original: Int32Array,
    stall_original: Int32Array,
    is_depbar: BoolArray,
    yields: UInt8Array,
    write_sb: UInt8Array,
    read_sb: UInt8Array,
    wait: UInt8Array,
) -> int:
    """Check one block; with ``repair``, raise stall counts that are too short in place.

    ``order`` holds original indices by position. The arrays from ``start`` on are the fields of
    ``BlockArrays`` and :class:`ControlArrays`, not the tuples: numba takes 1 us to unpack those, a
    tenth of a draw. Stall counts of 0 are never raised, because they encode a special wait.
    Returns a :class:`Violation`.
    """
    issue = np.full(len(order), -1, np.int32)
    set_at = np.full(8, -16, np.int32)
    now = 0
    for p in range(len(order)):
        index = order[p]
        local = index - start
        earliest, violation = now, 0
        for e in range(edge_offsets[local], edge_offsets[local + 1]):
            first = issue[edge_first[e]]
            if first < 0:
                return 1
            if first + edge_cycles[e] > earliest:
                earliest, violation = first + edge_cycles[e], 1
        if after_start[local] > earliest:
            earliest, violation = after_start[local], 2
        if p > 0:
            before = order[p - 1]
            least = gap[pipe[before], pipe[index]]
            # Neighbours of the original may keep its stall count, however small it is.
            unchanged = next_original[before] == index and stall[before] >= stall_original[before]
            if stall[before] < least and not unchanged and now - stall[before] + least > earliest:
                earliest, violation = now - stall[before] + least, 4
        if wait[index] and not is_depbar[index]:
            for board in range(6):
                if wait[index] >> board & 1 and set_at[board] + 2 > earliest:
                    earliest, violation = set_at[board] + 2, 5
        if earliest > now:
            if not repair or p == 0:
                return violation
            before = order[p - 1]
            raised = stall[before] + earliest - now
            if stall[before] == 0 or raised > max_stall(yields[before]):
                return violation
            stall[before] = raised
            now = earliest
        issue[local] = now
        set_at[write_sb[index]] = now
        set_at[read_sb[index]] = now
        now += stall[index]
    short = 0
    for local in range(len(order)):
        short = max(short, before_end[local] - (now - issue[local]))
    if short > 0:
        last = order[len(order) - 1]
        if not repair or stall[last] == 0 or stall[last] + short > max_stall(yields[last]):
            return 3
        stall[last] += short
    return 0


def check_block(
    block: BlockGraph, state: Schedule, order: Int32Array, stall: UInt8Array, repair: bool = False
) -> Violation:
    """Check a block with the given order and stall counts, and the other fields of ``state``.

    With ``repair``, stall counts that are too short are raised in place.
    """
    code = check_block_arrays(
        order,
        stall,
        repair,
        *block.arrays,
        state.yields,
        state.write_sb,
        state.read_sb,
        state.wait,
    )
    return Violation(code)
