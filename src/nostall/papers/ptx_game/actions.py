"""Actions of the game on PTX: shifts of memory accesses, numbered, with a mask of legal ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.ptx.program.resources import MEMORY, Resource
from nostall.ptx.schedule.moves import Shift
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

OFFSETS = (-1, 1, -4, 4, -16, 16)
"""Positions of one shift.  ptxas re-orders its input, so that a shift by one often changes nothing;
the assembly game of CuAsmRL has -1 and 1."""
_ACCESSES = MEMORY | {Resource.STABLE, Resource.FENCE}
_TAGS = frozenset(("order",))


class Shifts:
    """Each memory access of a kernel, moved up or down by one of the offsets.

    Action ``n`` moves candidate ``n // len(offsets)`` by ``offsets[n % len(offsets)]``; the last
    action ends the episode and is never legal.  An action means the same in each state.
    """

    def __init__(self, space: PtxSpace, offsets: tuple[int, ...] = OFFSETS) -> None:
        self.space, self.offsets = space, offsets
        self.candidates = [
            (number, index)
            for number, block in enumerate(space.blocks)
            for index, unit in enumerate(block.units)
            if len(block) > 1 and _ACCESSES & (unit.reads | unit.writes)
        ]
        self.count = len(self.candidates) * len(offsets) + 1
        self._mask = np.zeros(self.count, dtype=np.bool_)

    def move(self, action: int) -> Shift | None:
        """The move of an action; None if the action ends the episode."""
        if action == self.count - 1:
            return None
        candidate, offset = divmod(action, len(self.offsets))
        return Shift(*self.candidates[candidate], self.offsets[offset], _TAGS)

    def mask(self, state: PtxState, changed: int | None = None) -> NDArray[np.bool_]:
        """Which actions are legal in ``state``, [count].

        ``changed``: the only block whose order differs from that of the previous call.
        """
        width = len(self.offsets)
        for number, (block, unit) in enumerate(self.candidates):
            if changed is None or block == changed:
                for at, offset in enumerate(self.offsets):
                    legal = self.space.is_legal(state, Shift(block, unit, offset, _TAGS))
                    self._mask[width * number + at] = legal
        return self._mask.copy()
