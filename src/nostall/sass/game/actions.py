"""What a player may do: a fixed list of actions, and which of them are legal now."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.game.adjacency import Adjacency
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.graph import Graph
from nostall.sass.schedule.moves import ScheduleMove, Slide

PUBLISHED = ("LDGSTS", "LDG", "LDS", "STG")
"""Mnemonics that CuAsmRL's ``reproduce`` branch moves on sm_80."""

_TAGS = frozenset(("slide", "order", "exact", "distance=1", "memory"))


class Actions(ABC):
    """Numbered actions of one kernel.  Their meaning never changes; their legality does."""

    count: int

    @abstractmethod
    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        """What the action does in ``state``; None when it ends the episode."""

    @abstractmethod
    def mask(self, state: Schedule, before: ScheduleMove | None = None) -> NDArray[np.bool_]:
        """[count]: legal in ``state``.  ``before`` is the move that led here from the state asked
        about last; what it cannot have changed is not computed again."""


class MemorySlides(Actions):
    """CuAsmRL's actions: each global or shared access one line up or down, its control word with
    it, and an action that ends the episode and is never legal.

    Action ``2 c`` moves candidate c up, ``2 c + 1`` down; candidates are in original order (in the
    published code their numbers follow the present order; here an action keeps its meaning).
    """

    def __init__(
        self, function: Function, graph: Graph, named: tuple[str, ...] = PUBLISHED
    ) -> None:
        self.candidates = np.array(
            [
                i.index
                for i in function.instructions
                if i.base in named and graph.memory[i.index] and not graph.fixed[i.index]
            ],
            dtype=np.int32,
        )
        self.count = 2 * len(self.candidates) + 1
        self._adjacency = Adjacency(graph)
        self._graph = graph
        self._block_of = graph.block_of[self.candidates]
        self._blocks = sorted({int(number) for number in self._block_of})
        self._members = {n: np.flatnonzero(self._block_of == n) for n in self._blocks}
        self._mask = np.zeros(self.count, dtype=np.bool_)

    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        if action == self.count - 1:
            return None
        candidate, down = divmod(action, 2)
        return Slide(int(self.candidates[candidate]), 1 if down else -1, _TAGS, exact=True)

    def mask(self, state: Schedule, before: ScheduleMove | None = None) -> NDArray[np.bool_]:
        blocks = self._blocks
        if before is not None:
            blocks = [int(self._graph.block_of[before.index])]
        for number in blocks:
            if number in self._members:
                self._look(state, number)
        return self._mask.copy()

    def _look(self, state: Schedule, number: int) -> None:
        block, members = self._graph.blocks[number], self._members[number]
        span = state.order[block.start : block.end]
        _spread(
            span,
            block.start,
            self.candidates,
            members,
            self._adjacency.exchanges(state, number),
            self._mask,
        )


@njit(cache=True)  # type: ignore[untyped-decorator]
def _spread(
    span: NDArray[np.int32],
    start: int,
    candidates: NDArray[np.int32],
    members: NDArray[np.int64],
    exchanges: NDArray[np.bool_],
    mask: NDArray[np.bool_],
) -> None:
    """Actions of a block's candidates from the legal exchanges of its neighbours."""
    at = np.empty(len(span), np.int32)
    for p in range(len(span)):
        at[span[p] - start] = p
    for c in members:
        p = at[candidates[c] - start]
        mask[2 * c] = p > 0 and exchanges[p - 1]
        mask[2 * c + 1] = p + 1 < len(span) and exchanges[p]
