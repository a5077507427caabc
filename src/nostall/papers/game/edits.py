"""nostall's own actions: slides over several positions, stall counts and the yield flag."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.core.space import NO_TAGS
from nostall.papers.game.actions import ActionSet
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.arrays import BoolArray, Int32Array, UInt8Array
from nostall.sass.schedule.graph import BlockArrays, DependenceGraph
from nostall.sass.schedule.legality import ControlArrays, check_block_arrays, max_stall
from nostall.sass.schedule.moves import FlipYield, ScheduleMove, SetStall, Slide

SLIDES = (-8, -4, -2, -1, 1, 2, 4, 8)
VARIANTS = (*(f"slide {offset:+d}" for offset in SLIDES), "stall -1", "stall +1", "flip yield")
"""Actions of one instruction, in the order of the action head; policy files record this list."""

_SLIDE_OFFSETS = np.array(SLIDES, dtype=np.int32)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _find_legal(
    order: Int32Array,
    members: Int32Array,
    block: BlockArrays,
    stall: UInt8Array,
    control: ControlArrays,
    reuse: UInt8Array,
    slides: Int32Array,
    legal: BoolArray,
) -> None:
    """Set ``legal[m, v]`` if variant v of instruction ``members[m]`` of the block is legal."""
    # Unpacked once, because numba accesses the fields of tuples slowly.
    (
        start, offsets, first, cycles, after_start, before_end, pipe, gap, next_original,
        stall_original, is_depbar,
    ) = block  # fmt: skip
    yields, write_sb, read_sb, wait = control
    n, count = len(order), len(slides)
    position = np.empty(n, np.int32)
    for p in range(n):
        position[order[p] - start] = p
    new_order, new_stall = order.copy(), stall.copy()
    for m in range(len(members)):
        index = members[m]
        source = position[index - start]
        for v in range(count + 2):
            if v < count:
                target = source + slides[v]
                if target < 0 or target >= n:
                    legal[m, v] = False
                    continue
                step = 1 if target > source else -1
                p = source
                while p != target:
                    new_order[p] = order[p + step]
                    p += step
                new_order[target] = index
            else:
                changed = stall[index] + (1 if v > count else -1)
                if changed < 1 or changed > max_stall(yields[index]):
                    legal[m, v] = False
                    continue
                new_stall[index] = changed
            violation = check_block_arrays(
                new_order, new_stall, v < count, start, offsets, first, cycles, after_start,
                before_end, pipe, gap, next_original, stall_original, is_depbar, yields, write_sb,
                read_sb, wait,
            )  # fmt: skip
            legal[m, v] = violation == 0
            for p in range(n):
                new_order[p] = order[p]
                new_stall[order[p]] = stall[order[p]]
        flips = 1 <= stall[index] <= 11 if yields[index] else reuse[index] == 0
        legal[m, count + 2] = flips


class ScheduleEdits(ActionSet):
    """``len(VARIANTS)`` actions for each instruction that may move, the candidates.

    Action ``len(VARIANTS) * c + v`` is variant v of candidate c; candidates are numbered in
    original order.
    """

    def __init__(self, function: Function, graph: DependenceGraph) -> None:
        self.candidates = np.array(
            [i.index for i in function.instructions if not graph.fixed[i.index]], dtype=np.int32
        )
        self.count = len(VARIANTS) * len(self.candidates)
        self._graph = graph
        block_of = graph.block_numbers[self.candidates]
        self._members = {
            int(number): np.flatnonzero(block_of == number) for number in np.unique(block_of)
        }
        self._mask = np.zeros((len(self.candidates), len(VARIANTS)), dtype=np.bool_)

    def move(self, state: Schedule, action: int) -> ScheduleMove | None:
        candidate, variant = divmod(action, len(VARIANTS))
        index = int(self.candidates[candidate])
        if variant < len(SLIDES):
            return Slide(index, SLIDES[variant], NO_TAGS)
        if variant < len(SLIDES) + 2:
            change = 1 if variant > len(SLIDES) else -1
            return SetStall(index, int(state.stall[index]) + change, NO_TAGS)
        return FlipYield(index, NO_TAGS)

    def mask(self, state: Schedule, last_move: ScheduleMove | None = None) -> BoolArray:
        blocks = self._members
        if last_move is not None:
            number = int(self._graph.block_numbers[last_move.index])
            blocks = {number: self._members[number]}
        for number, members in blocks.items():
            self._mask[members] = self._block_mask(state, number, members)
        return self._mask.reshape(-1).copy()

    def _block_mask(self, state: Schedule, number: int, members: NDArray[np.int64]) -> BoolArray:
        """Legal variants of the candidates with the given numbers, [members, variants]."""
        block = self._graph.blocks[number]
        legal = np.zeros((len(members), len(VARIANTS)), dtype=np.bool_)
        _find_legal(
            state.order[block.start : block.end],
            self.candidates[members],
            block.arrays,
            state.stall,
            ControlArrays(state.yields, state.write_sb, state.read_sb, state.wait),
            state.reuse,
            _SLIDE_OFFSETS,
            legal,
        )
        return legal
