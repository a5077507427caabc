"""All legal schedules of one kernel as a search space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nostall.core import garbage_collector
from nostall.core.space import NO_TAGS, Space, Tags
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule import graph as graphs
from nostall.sass.schedule.constraints import BoardUse
from nostall.sass.schedule.legality import REASONS, Broken, settled
from nostall.sass.schedule.moves import (
    Board,
    Restall,
    Reuse,
    ScheduleMove,
    Slide,
    Swap,
    Yield,
)
from nostall.sass.schedule.state import Bytes, Schedule

REACH = 16
"""Longest slide in positions."""

_SLIDES = [k for k in range(-REACH, REACH + 1) if k != 0]
_VARIANTS = len(_SLIDES) + 2 + 1 + 15 + 1 + 3 + 12
_MEMORY = frozenset(("memory",))
_KINDS = {
    "swap": frozenset(("swap", "order", "distance=1")),
    "stall": frozenset(("stall", "control")),
    "yield": frozenset(("yield", "control")),
    "reuse": frozenset(("reuse", "control")),
    "board": frozenset(("board", "control")),
}
_EXACT_TAGS = frozenset(("slide", "order", "exact", "distance=1"))
_SLIDE_TAGS = {k: frozenset(("slide", "order", f"distance={abs(k)}")) for k in _SLIDES}


class ScheduleSpace(Space[Schedule, ScheduleMove]):
    """Schedules of ``function`` that keep every dependence and protection of its present one."""

    def __init__(self, program: Program, function: Function) -> None:
        self.program = program
        self.function = function
        with garbage_collector.paused():
            self.graph = graphs.build(function, program.sm)
        self._start = Schedule.of(function)
        self._asynchronous = 0
        for block in self.graph.blocks:
            self._asynchronous |= block.boards.special
        free = np.flatnonzero(~self.graph.fixed)
        self._free: list[int] = free.tolist()
        self._memory: list[int] = [i for i in self._free if self.graph.memory[i]]

    def start(self) -> Schedule:
        return self._start

    def key(self, state: Schedule) -> bytes:
        return state.key()

    def dump(self, state: Schedule) -> str:
        return state.dump()

    def load(self, text: str) -> Schedule:
        return Schedule.load(text, len(self.function.instructions))

    def impose(self, state: Schedule) -> Program:
        """The program with this schedule."""
        return self.program.with_function(state.impose(self.function))

    def draw(
        self, state: Schedule, rng: np.random.Generator, wanted: Tags = NO_TAGS
    ) -> ScheduleMove | None:
        """One uniform draw over all instructions and all variants of a move.

        Who asks for slides by one position gets SIP's move, which leaves control words alone.
        """
        pool = self._memory if "memory" in wanted else self._free
        if not pool:
            return None
        index = pool[int(rng.integers(len(pool)))]
        if "slide" in wanted and "distance=1" in wanted:
            variant = len(_SLIDES) + int(rng.integers(2))
        else:
            variant = int(rng.integers(_VARIANTS))
        move = self._variant(state, index, variant)
        if move is None or not wanted <= move.tags or self._try(state, move) is None:
            return None
        return move

    def moves(self, state: Schedule) -> Iterator[ScheduleMove]:
        for index in self._free:
            for variant in range(_VARIANTS):
                move = self._variant(state, index, variant)
                if move is not None and self._try(state, move) is not None:
                    yield move

    def apply(self, state: Schedule, move: ScheduleMove) -> Schedule:
        """The schedule after ``move``; raises the move's own error when it is illegal."""
        after = self._try(state, move)
        if after is None:
            raise move.error(
                f"{move} is illegal: {self._why(state, move)}; offered moves come from propose() "
                "or moves()"
            )
        return after

    def _variant(self, state: Schedule, index: int, variant: int) -> ScheduleMove | None:
        """Variant number ``variant`` of the moves of one instruction; None when it is no change."""
        memory = _MEMORY if self.graph.memory[index] else NO_TAGS
        if variant < len(_SLIDES):
            by = _SLIDES[variant]
            return Slide(index, by, _SLIDE_TAGS[by] | memory)
        variant -= len(_SLIDES)
        if variant < 2:
            return Slide(index, 2 * variant - 1, _EXACT_TAGS | memory, exact=True)
        variant -= 2
        if variant == 0:
            return Swap(index, _KINDS["swap"] | memory)
        if variant <= 15:
            same = variant == state.stall[index]
            return None if same else Restall(index, variant, _KINDS["stall"] | memory)
        if variant == 16:
            return Yield(index, _KINDS["yield"] | memory)
        if variant <= 19:
            return Reuse(index, variant - 17, _KINDS["reuse"] | memory)
        write, board = divmod(variant - 20, 6)
        return Board(index, bool(write), board, _KINDS["board"] | memory)

    def _try(self, state: Schedule, move: ScheduleMove) -> Schedule | None:
        """The schedule after ``move``, or None when it is illegal."""
        if self.graph.fixed[move.index]:
            return None
        match move:
            case Slide():
                return self._slide(state, move.index, move.by, repair=not move.exact)
            case Swap():
                return self._slide(state, move.index, 1, keep_stalls=True)
            case Restall():
                return self._restall(state, move)
            case Yield():
                return self._yield(state, move)
            case Reuse():
                return self._reuse(state, move)
            case Board():
                return self._board(state, move)

    def _why(self, state: Schedule, move: ScheduleMove) -> str:
        if self.graph.fixed[move.index]:
            return "the instruction is a wall, pinned, or next to code that cannot be seen"
        if isinstance(move, Slide | Swap):
            by = move.by if isinstance(move, Slide) else 1
            changed = self._moved(state, move.index, by, keep_stalls=isinstance(move, Swap))
            if changed is None:
                return "it would leave its block"
            after = replace(state, order=changed[0], stall=changed[1])
            broken, _ = self._settled(after, move.index, repair=isinstance(move, Slide))
            return REASONS.get(broken, "a stall could not be encoded")
        return (move.error.__doc__ or "").rstrip(".")

    def _settled(
        self, state: Schedule, index: int, *, repair: bool = False
    ) -> tuple[Broken, Bytes]:
        """Check the block of ``index``; with ``repair`` the stalls it needs come back."""
        g = self.graph
        block = g.blocks[g.block_of[index]]
        stall = state.stall.copy()
        span = state.order[block.start : block.end]
        return settled(g, block, state, span, stall, repair=repair), stall

    def _moved(
        self, state: Schedule, index: int, by: int, *, keep_stalls: bool
    ) -> tuple[NDArray[np.int32], Bytes, int, int] | None:
        """(order, stall, old position, new position) after a slide, or None outside the block."""
        g = self.graph
        block = g.blocks[g.block_of[index]]
        span = state.order[block.start : block.end]
        at = int(np.flatnonzero(span == index)[0])
        to = at + by
        if not 0 <= to < len(span):
            return None
        order = state.order.copy()
        part = order[block.start : block.end]
        if to > at:
            part[at:to] = span[at + 1 : to + 1]
        else:
            part[to + 1 : at + 1] = span[to:at]
        part[to] = index
        stall = state.stall
        if keep_stalls:
            other = int(span[to])
            stall = stall.copy()
            stall[index], stall[other] = state.stall[other], state.stall[index]
        return order, stall, block.start + at, block.start + to

    def _slide(
        self,
        state: Schedule,
        index: int,
        by: int,
        *,
        keep_stalls: bool = False,
        repair: bool = False,
    ) -> Schedule | None:
        changed = self._moved(state, index, by, keep_stalls=keep_stalls)
        if changed is None:
            return None
        order, stall, at, to = changed
        if keep_stalls and not self._stalls_fit(state, stall, (index, int(state.order[at + 1]))):
            return None
        after = replace(state, order=order, stall=stall)
        broken, stall = self._settled(after, index, repair=repair)
        if broken is not Broken.OK:
            return None
        reuse = self._without_stale_reuse(state, order, at, to)
        return replace(after, stall=stall, reuse=reuse)

    def _stalls_fit(self, state: Schedule, stall: Bytes, pair: tuple[int, int]) -> bool:
        """Exchanged stalls can be encoded, and neither is a wall."""
        return not any(
            self.graph.fixed[i] or (not state.yields[i] and not 1 <= stall[i] <= 11) for i in pair
        )

    def _without_stale_reuse(
        self, state: Schedule, order: NDArray[np.int32], at: int, to: int
    ) -> Bytes:
        """Clear the reuse flags of words whose next word is no longer the same."""
        low, high = max(min(at, to) - 1, 0), max(at, to)
        before, after = state.order[low : high + 2], order[low : high + 2]
        following = dict(zip(before.tolist(), before[1:].tolist(), strict=False))
        changed = [
            i
            for i, j in zip(after.tolist(), after[1:].tolist(), strict=False)
            if following.get(i) != j and state.reuse[i] and not self.graph.fixed[i]
        ]
        if not changed:
            return state.reuse
        reuse = state.reuse.copy()
        reuse[changed] = 0
        return reuse

    def _restall(self, state: Schedule, move: Restall) -> Schedule | None:
        index, cycles = move.index, move.stall
        if cycles == state.stall[index] or not 1 <= cycles <= (15 if state.yields[index] else 11):
            return None
        stall = state.stall.copy()
        stall[index] = cycles
        after = replace(state, stall=stall)
        return after if self._settled(after, index)[0] is Broken.OK else None

    def _yield(self, state: Schedule, move: Yield) -> Schedule | None:
        index = move.index
        if state.yields[index]:
            if not 1 <= state.stall[index] <= 11:
                return None
        elif state.reuse[index]:
            return None
        yields = state.yields.copy()
        yields[index] ^= 1
        return replace(state, yields=yields)

    def _reuse(self, state: Schedule, move: Reuse) -> Schedule | None:
        index, slot = move.index, move.slot
        slots = self.graph.slots
        if not state.reuse[index] >> slot & 1:
            register = slots[index, slot]
            following = self._next(state, index)
            if (
                register < 0
                or not self._start.reuse[index] >> slot & 1
                or state.yields[index]
                or slots[index, 3] >> slot & 1
                or following is None
                or slots[following, slot] != register
            ):
                return None
        reuse = state.reuse.copy()
        reuse[index] ^= 1 << slot
        return replace(state, reuse=reuse)

    def _next(self, state: Schedule, index: int) -> int | None:
        block = self.graph.blocks[self.graph.block_of[index]]
        span = state.order[block.start : block.end]
        at = int(np.flatnonzero(span == index)[0])
        return int(span[at + 1]) if at + 1 < len(span) else None

    def _board(self, state: Schedule, move: Board) -> Schedule | None:
        index, board = move.index, move.board
        field = state.write_sb if move.write else state.read_sb
        old = int(field[index])
        use = self.graph.blocks[self.graph.block_of[index]].boards
        waiters = use.waiters.get((index, move.write), set())
        special = self._asynchronous | use.entry
        if (
            old > 5
            or board == old
            or len(waiters) != 1
            or (index, move.write) in use.locked
            or self._asynchronous >> old & 1
            or special >> board & 1
        ):
            return None
        waiter = next(iter(waiters))
        if self.graph.fixed[waiter]:
            return None
        boards = field.copy()
        boards[index] = board
        changed = replace(state, write_sb=boards) if move.write else replace(state, read_sb=boards)
        wait = state.wait.copy()
        wait[waiter] |= 1 << board
        if not (use.entry >> old & 1 or use.unknown_entry) and not self._needed(
            changed, use, waiter, old
        ):
            wait[waiter] &= ~np.uint8(1 << old)
        after = replace(changed, wait=wait)
        return after if self._settled(after, index)[0] is Broken.OK else None

    def _needed(self, state: Schedule, use: BoardUse, waiter: int, board: int) -> bool:
        """Whether something else relies on ``waiter`` waiting for ``board``."""
        return any(
            waiter in waiters and (state.write_sb if write else state.read_sb)[index] == board
            for (index, write), waiters in use.waiters.items()
        )
