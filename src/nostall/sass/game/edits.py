"""Nostall's own actions: slides over several places, stalls and the yield flag, for every
instruction that may move."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.game.actions import Actions
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.graph import Graph
from nostall.sass.schedule.legality import settle_block
from nostall.sass.schedule.moves import Restall, ScheduleMove, Slide, Yield
from nostall.sass.schedule.state import Bytes

SLIDES = (-8, -4, -2, -1, 1, 2, 4, 8)
VARIANTS = (*(f"slide {by:+d}" for by in SLIDES), "stall -1", "stall +1", "flip yield")
"""What can be done to one instruction; part of the layout of policy files."""

_BY = np.array(SLIDES, dtype=np.int32)
Ints = NDArray[np.int32]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _legal(
    span: Ints,
    members: Ints,
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
    stall: Bytes,
    yields: Bytes,
    write_sb: Bytes,
    read_sb: Bytes,
    wait: Bytes,
    reuse: Bytes,
    drains: NDArray[np.bool_],
    slides: Ints,
    legal: NDArray[np.bool_],
) -> None:
    """``legal[m, v]``: variant v of member m (an instruction of the block) is legal."""
    n = len(span)
    at = np.empty(n, np.int32)
    for p in range(n):
        at[span[p] - start] = p
    order, work = span.copy(), stall.copy()
    for m in range(len(members)):
        index = members[m]
        here = at[index - start]
        for v in range(len(slides) + 2):
            if v < len(slides):
                to = here + slides[v]
                if to < 0 or to >= n:
                    legal[m, v] = False
                    continue
                step = 1 if to > here else -1
                p = here
                while p != to:
                    order[p] = span[p + step]
                    p += step
                order[to] = index
            else:
                changed = stall[index] + (1 if v > len(slides) else -1)
                if changed < 1 or changed > (15 if yields[index] else 11):
                    legal[m, v] = False
                    continue
                work[index] = changed
            code = settle_block(
                order, work, v < len(slides), start, into, first, cycles, after_start, before_end,
                pipe, gap, next_original, stall_original, yields, write_sb, read_sb, wait, drains,
            )  # fmt: skip
            legal[m, v] = code == 0
            for p in range(n):
                order[p] = span[p]
                work[span[p]] = stall[span[p]]
        flips = 1 <= stall[index] <= 11 if yields[index] else reuse[index] == 0
        legal[m, len(slides) + 2] = flips


class Edits(Actions):
    """``len(VARIANTS)`` actions for each instruction that may move.

    Action ``len(VARIANTS) * c + v`` is variant v of candidate c, in original order.
    """

    def __init__(self, function: Function, graph: Graph) -> None:
        self.candidates = np.array(
            [i.index for i in function.instructions if not graph.fixed[i.index]], dtype=np.int32
        )
        self.count = len(VARIANTS) * len(self.candidates)
        self._graph = graph
        block_of = graph.block_of[self.candidates]
        self._members = {
            int(number): np.flatnonzero(block_of == number) for number in np.unique(block_of)
        }
        self._mask = np.zeros((len(self.candidates), len(VARIANTS)), dtype=np.bool_)

    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        candidate, variant = divmod(action, len(VARIANTS))
        index = int(self.candidates[candidate])
        tags: frozenset[str] = frozenset()
        if variant < len(SLIDES):
            return Slide(index, SLIDES[variant], tags)
        if variant < len(SLIDES) + 2:
            change = 1 if variant > len(SLIDES) else -1
            return Restall(index, int(state.stall[index]) + change, tags)
        return Yield(index, tags)

    def mask(self, state: Schedule, before: ScheduleMove | None = None) -> NDArray[np.bool_]:
        touched = self._members
        if before is not None:
            number = int(self._graph.block_of[before.index])
            touched = {number: self._members[number]}
        for number, members in touched.items():
            self._mask[members] = self._look(state, number, members)
        return self._mask.reshape(-1).copy()

    def _look(self, state: Schedule, number: int, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        g, block = self._graph, self._graph.blocks[number]
        legal = np.zeros((len(members), len(VARIANTS)), dtype=np.bool_)
        _legal(
            state.order[block.start : block.end],
            self.candidates[members],
            *g.rules(block),
            state.stall,
            state.yields,
            state.write_sb,
            state.read_sb,
            state.wait,
            state.reuse,
            g.drains,
            _BY,
            legal,
        )
        return legal
