"""Legal exchanges of neighbouring instructions, for all positions of a block at once, compiled.

An exchange moves both control words with their instructions. The constraints are those of
:mod:`nostall.sass.schedule.legality`. Each exchange is checked only against the constraints that
it can violate, because a check of the whole block for each would take most of an episode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from nostall.sass.schedule.arrays import BoolArray, Int32Array, UInt8Array
from nostall.sass.schedule.graph import BlockArrays, BlockGraph, DependenceGraph
from nostall.sass.schedule.legality import ControlArrays, Violation, check_block
from nostall.sass.schedule.state import Schedule


class _OutgoingEdges(NamedTuple):
    """Edges of a block by their first instruction; ``BlockArrays`` has them by their second.

    Instruction l is the first of the edges ``offsets[l]`` to ``offsets[l + 1]``. All numbers are
    local to the block.
    """

    offsets: Int32Array
    second: Int32Array
    cycles: Int32Array


@njit(cache=True)  # type: ignore[untyped-decorator]
def _find_legal(
    order: Int32Array,
    stall: UInt8Array,
    block: BlockArrays,
    outgoing: _OutgoingEdges,
    control: ControlArrays,
    legal: BoolArray,
) -> None:
    """Set ``legal[p]`` if positions p and p + 1 of a legal block may be exchanged."""
    # Unpacked once, because numba accesses the fields of tuples slowly.
    (
        start, offsets, first, cycles, after_start, before_end, pipe, gap, next_original,
        stall_original, is_depbar,
    ) = block  # fmt: skip
    out_offsets, out_second, out_cycles = outgoing
    _, write_sb, read_sb, wait = control
    n = len(order)
    issue = np.zeros(n, np.int32)
    now = 0
    for p in range(n):
        issue[order[p] - start] = now
        now += stall[order[p]]
    for p in range(n - 1):
        a, b = order[p], order[p + 1]
        # After the exchange b issues at ``begin`` and a at ``moved``.
        begin = issue[a - start]
        moved = begin + stall[b]
        ok = after_start[b - start] <= begin and now - moved >= before_end[a - start]
        for e in range(offsets[b - start], offsets[b - start + 1]):
            ok = ok and first[e] != a - start and issue[first[e]] + cycles[e] <= begin
        for e in range(out_offsets[a - start], out_offsets[a - start + 1]):
            ok = ok and issue[out_second[e]] >= moved + out_cycles[e]
        # The stall counts of the three pairs of neighbours around the exchanged positions.
        for pair in range(3):
            if not ok or (pair == 0 and p == 0) or (pair == 2 and p + 2 == n):
                continue
            x = order[p - 1] if pair == 0 else (b if pair == 1 else a)
            y = b if pair == 0 else (a if pair == 1 else order[p + 2])
            unchanged = next_original[x] == y and stall[x] >= stall_original[x]
            ok = unchanged or stall[x] >= gap[pipe[x], pipe[y]]
        legal[p] = ok and _waits_hold(
            order, p, start, issue, moved, is_depbar, write_sb, read_sb, wait
        )


@njit(cache=True)  # type: ignore[untyped-decorator]
def _waits_hold(
    order: Int32Array,
    p: int,
    start: int,
    issue: Int32Array,
    moved: int,
    is_depbar: BoolArray,
    write_sb: UInt8Array,
    read_sb: UInt8Array,
    wait: UInt8Array,
) -> bool:
    """Whether no instruction waits for a scoreboard in the cycle after it is set.

    Positions p and p + 1 are exchanged, and the instruction of position p issues at ``moved``.
    """
    a, b = order[p], order[p + 1]
    begin = issue[a - start]
    if wait[b] and not is_depbar[b]:
        q = p - 1
        while q >= 0 and issue[order[q] - start] + 2 > begin:
            if _waits_for(wait[b], write_sb[order[q]], read_sb[order[q]]):
                return False
            q -= 1
    if wait[a] and not is_depbar[a]:
        q = p - 1
        while q >= 0 and issue[order[q] - start] + 2 > moved:
            if _waits_for(wait[a], write_sb[order[q]], read_sb[order[q]]):
                return False
            q -= 1
        if moved < begin + 2 and _waits_for(wait[a], write_sb[b], read_sb[b]):
            return False
    q = p + 2
    while q < len(order) and issue[order[q] - start] < moved + 2:
        i = order[q]
        if wait[i] and not is_depbar[i]:
            if _waits_for(wait[i], write_sb[a], read_sb[a]):
                return False
            if issue[i - start] < begin + 2 and _waits_for(wait[i], write_sb[b], read_sb[b]):
                return False
        q += 1
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def _waits_for(wait: int, write_sb: int, read_sb: int) -> bool:
    """Whether a wait mask contains one of the scoreboards that an instruction sets."""
    return bool((write_sb < 6 and wait >> write_sb & 1) or (read_sb < 6 and wait >> read_sb & 1))


class NeighbourExchanges:
    """Legal exchanges of neighbours in the blocks of one function."""

    def __init__(self, graph: DependenceGraph) -> None:
        self.graph = graph
        self._outgoing = [_outgoing_edges(block) for block in graph.blocks]

    def legal(self, state: Schedule, number: int) -> BoolArray:
        """Whether positions p and p + 1 of block ``number`` may be exchanged, [size - 1]."""
        block = self.graph.blocks[number]
        order = state.order[block.start : block.end]
        legal = np.zeros(max(0, len(order) - 1), dtype=np.bool_)
        if len(order) < 2:
            return legal
        if not self._is_legal(state, block, order):
            return self._check_each(state, block, order)
        control = ControlArrays(state.yields, state.write_sb, state.read_sb, state.wait)
        _find_legal(order, state.stall, block.arrays, self._outgoing[number], control, legal)
        return legal

    def _check_each(self, state: Schedule, block: BlockGraph, order: Int32Array) -> BoolArray:
        """Check each exchange in full, for an illegal block that an exchange may make legal."""
        legal = np.zeros(len(order) - 1, dtype=np.bool_)
        for p in range(len(order) - 1):
            exchanged = order.copy()
            exchanged[p], exchanged[p + 1] = order[p + 1], order[p]
            # Read-only like the arrays of a schedule: numba compiles each kind separately.
            exchanged.setflags(write=False)
            legal[p] = self._is_legal(state, block, exchanged)
        return legal

    def _is_legal(self, state: Schedule, block: BlockGraph, order: Int32Array) -> bool:
        return check_block(block, state, order, state.stall.copy()) is Violation.NONE


def _outgoing_edges(block: BlockGraph) -> _OutgoingEdges:
    size = block.end - block.start
    first = block.arrays.edge_first
    second = np.repeat(np.arange(size, dtype=np.int32), np.diff(block.arrays.edge_offsets))
    by_first = np.argsort(first, kind="stable")
    offsets = np.searchsorted(first[by_first], np.arange(size + 1)).astype(np.int32)
    return _OutgoingEdges(offsets, second[by_first], block.arrays.edge_cycles[by_first])
