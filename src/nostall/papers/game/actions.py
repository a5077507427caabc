"""Actions of the assembly game: a fixed numbered set for each kernel, with a mask of legal ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.papers.game.neighbour_exchanges import NeighbourExchanges
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.arrays import BoolArray, Int32Array
from nostall.sass.schedule.graph import DependenceGraph
from nostall.sass.schedule.moves import ScheduleMove, Slide

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
