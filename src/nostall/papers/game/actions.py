"""Actions of the assembly game: a fixed numbered set for each kernel, with a mask of legal ones.

Legal exchanges of neighbouring instructions are found for all positions of a block at once.
An exchange moves both control words with their instructions. The constraints are those of
:mod:`nostall.sass.schedule.legality`. Each exchange is checked only against the constraints that
it can violate, because a check of the whole block for each would take most of an episode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.program.program import Function
from nostall.sass.schedule.arrays import BoolArray, Int32Array, UInt8Array
from nostall.sass.schedule.graph import BlockArrays, BlockGraph, DependenceGraph
from nostall.sass.schedule.legality import ControlArrays, Violation, check_block
from nostall.sass.schedule.moves import ScheduleMove, Slide
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


CUASMRL_OPCODES = ("LDGSTS", "LDG", "LDS", "STG")
"""Opcodes that the ``reproduce`` branch of CuAsmRL's code moves on sm_80."""

_TAGS = frozenset(("slide", "order", "exact", "distance=1", "memory"))


class ActionSet(ABC):
    """Numbered actions of one kernel; the number of an action means the same in each state."""

    count: int

    @abstractmethod
    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        """The move of an action in ``state``; None if the action ends the episode."""

    @abstractmethod
    def mask(self, state: Schedule, last_move: ScheduleMove | None = None) -> BoolArray:
        """Which actions are legal in ``state``, [count].

        ``last_move`` is the move from the state of the previous call to this one. If it is given,
        only the actions of its block are checked again.
        """


class MemorySlides(ActionSet):
    """CuAsmRL's actions: slide a global or shared memory access one line up or down.

    The control word moves with its instruction. Action ``2 c`` moves candidate c up, ``2 c + 1``
    down; the last action ends the episode and is never legal. Candidates are numbered in original
    order (CuAsmRL's code numbers them in the current order).
    """

    def __init__(
        self,
        function: Function,
        graph: DependenceGraph,
        opcodes: tuple[str, ...] = CUASMRL_OPCODES,
    ) -> None:
        self.candidates = np.array(
            [
                i.index
                for i in function.instructions
                if i.base in opcodes and graph.memory[i.index] and not graph.fixed[i.index]
            ],
            dtype=np.int32,
        )
        self.count = 2 * len(self.candidates) + 1
        self._exchanges = NeighbourExchanges(graph)
        self._graph = graph
        self._block_of = graph.block_numbers[self.candidates]
        self._blocks = sorted({int(number) for number in self._block_of})
        self._members = {n: np.flatnonzero(self._block_of == n) for n in self._blocks}
        self._mask = np.zeros(self.count, dtype=np.bool_)

    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        if action == self.count - 1:
            return None
        candidate, down = divmod(action, 2)
        return Slide(int(self.candidates[candidate]), 1 if down else -1, _TAGS, exact=True)

    def mask(self, state: Schedule, last_move: ScheduleMove | None = None) -> BoolArray:
        blocks = self._blocks
        if last_move is not None:
            blocks = [int(self._graph.block_numbers[last_move.index])]
        for number in blocks:
            if number in self._members:
                self._update_mask(state, number)
        return self._mask.copy()

    def _update_mask(self, state: Schedule, number: int) -> None:
        block = self._graph.blocks[number]
        _mask_slides(
            state.order[block.start : block.end],
            block.start,
            self.candidates,
            self._members[number],
            self._exchanges.legal(state, number),
            self._mask,
        )


@njit(cache=True)  # type: ignore[untyped-decorator]
def _mask_slides(
    order: Int32Array,
    start: int,
    candidates: Int32Array,
    members: NDArray[np.int64],
    exchanges: BoolArray,
    mask: BoolArray,
) -> None:
    """Write the mask of one block's candidates.

    ``members`` are the numbers of the candidates in the block; ``exchanges[p]`` is true if
    positions p and p + 1 may be exchanged.
    """
    position = np.empty(len(order), np.int32)
    for p in range(len(order)):
        position[order[p] - start] = p
    for c in members:
        p = position[candidates[c] - start]
        mask[2 * c] = p > 0 and exchanges[p - 1]
        mask[2 * c + 1] = p + 1 < len(order) and exchanges[p]
