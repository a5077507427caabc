"""Search space of all legal schedules of one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nostall.core import garbage_collector
from nostall.core.space import NO_TAGS, Space, Tags
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.arrays import Int32Array, UInt8Array
from nostall.sass.schedule.constraints import ScoreboardUse
from nostall.sass.schedule.graph import build_graph
from nostall.sass.schedule.legality import VIOLATION_TEXTS, Violation, check_block
from nostall.sass.schedule.moves import (
    FlipReuse,
    FlipYield,
    ScheduleMove,
    SetScoreboard,
    SetStall,
    Slide,
    Swap,
)
from nostall.sass.schedule.state import Schedule

MAX_SLIDE = 16
"""Longest slide in positions."""

_OFFSETS = [k for k in range(-MAX_SLIDE, MAX_SLIDE + 1) if k != 0]
_VARIANTS = len(_OFFSETS) + 2 + 1 + 15 + 1 + 3 + 12
"""Moves of one instruction, legal or not: slides, 2 exact slides, 1 swap, 15 stall counts, 1 yield
flag, 3 reuse flags, 2 x 6 scoreboards."""
_MEMORY_TAG = frozenset(("memory",))
_TAGS = {
    "swap": frozenset(("swap", "order", "distance=1")),
    "stall": frozenset(("stall", "control")),
    "yield": frozenset(("yield", "control")),
    "reuse": frozenset(("reuse", "control")),
    "board": frozenset(("board", "control")),
}
_EXACT_TAGS = frozenset(("slide", "order", "exact", "distance=1"))
_SLIDE_TAGS = {k: frozenset(("slide", "order", f"distance={abs(k)}")) for k in _OFFSETS}


class ScheduleSpace(Space[Schedule, ScheduleMove]):
    """Schedules of ``function`` that keep all dependences and protections of the original."""

    def __init__(
        self, program: Program, function: Function, *, measured_latencies: bool = False
    ) -> None:
        """``measured_latencies``: issue distances measured on a GPU may lower mined ones.

        Raises :class:`~nostall.core.errors.UnsupportedArchitecture` if there are none for the
        architecture of ``program``.
        """
        self.program = program
        self.function = function
        self.measured_latencies = measured_latencies
        with garbage_collector.paused():
            self.graph = build_graph(function, program.sm, measured_latencies=measured_latencies)
        self._start = Schedule.from_function(function)
        self._asynchronous = 0
        for block in self.graph.blocks:
            self._asynchronous |= block.scoreboards.asynchronous
        movable = np.flatnonzero(~self.graph.fixed)
        self._movable: list[int] = movable.tolist()
        self._movable_memory: list[int] = [i for i in self._movable if self.graph.memory[i]]

    def start(self) -> Schedule:
        return self._start

    def key(self, state: Schedule) -> bytes:
        return state.key()

    def dump(self, state: Schedule) -> str:
        return state.dump()

    def load(self, text: str) -> Schedule:
        return Schedule.load(text, len(self.function.instructions))

    def impose(self, state: Schedule) -> Program:
        """The program with this schedule of the function."""
        return self.program.with_function(state.impose(self.function))

    def draw(
        self, state: Schedule, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> ScheduleMove | None:
        """One uniform draw over all instructions and all variants of a move.

        If ``required_tags`` has the tags of slides by one position, only exact slides are drawn:
        SIP's move, which leaves control words unchanged.
        """
        pool = self._movable_memory if "memory" in required_tags else self._movable
        if not pool:
            return None
        index = pool[int(rng.integers(len(pool)))]
        if "slide" in required_tags and "distance=1" in required_tags:
            variant = len(_OFFSETS) + int(rng.integers(2))
        else:
            variant = int(rng.integers(_VARIANTS))
        move = self._variant(state, index, variant)
        if (
            move is None
            or not required_tags <= move.tags
            or self.apply_if_legal(state, move) is None
        ):
            return None
        return move

    def moves(self, state: Schedule) -> Iterator[ScheduleMove]:
        for index in self._movable:
            for variant in range(_VARIANTS):
                move = self._variant(state, index, variant)
                if move is not None and self.apply_if_legal(state, move) is not None:
                    yield move

    def apply(self, state: Schedule, move: ScheduleMove) -> Schedule:
        """The schedule after ``move``; raises the error of the move's class if it is illegal."""
        after = self.apply_if_legal(state, move)
        if after is None:
            raise move.error(
                f"{move} is illegal: {self._illegal_reason(state, move)}; use moves from propose() "
                "or moves()"
            )
        return after

    def _variant(self, state: Schedule, index: int, variant: int) -> ScheduleMove | None:
        """Move number ``variant`` of an instruction; None if it would change nothing."""
        memory = _MEMORY_TAG if self.graph.memory[index] else NO_TAGS
        if variant < len(_OFFSETS):
            offset = _OFFSETS[variant]
            return Slide(index, offset, _SLIDE_TAGS[offset] | memory)
        variant -= len(_OFFSETS)
        if variant < 2:
            return Slide(index, 2 * variant - 1, _EXACT_TAGS | memory, exact=True)
        variant -= 2
        if variant == 0:
            return Swap(index, _TAGS["swap"] | memory)
        if variant <= 15:
            same = variant == state.stall[index]
            return None if same else SetStall(index, variant, _TAGS["stall"] | memory)
        if variant == 16:
            return FlipYield(index, _TAGS["yield"] | memory)
        if variant <= 19:
            return FlipReuse(index, variant - 17, _TAGS["reuse"] | memory)
        write, scoreboard = divmod(variant - 20, 6)
        return SetScoreboard(index, bool(write), scoreboard, _TAGS["board"] | memory)

    def apply_if_legal(self, state: Schedule, move: ScheduleMove) -> Schedule | None:
        """The schedule after ``move``; None if the move is illegal."""
        if self.graph.fixed[move.index]:
            return None
        match move:
            case Slide():
                return self._slide(state, move.index, move.offset, repair=not move.exact)
            case Swap():
                return self._slide(state, move.index, 1, keep_stalls=True)
            case SetStall():
                return self._set_stall(state, move)
            case FlipYield():
                return self._flip_yield(state, move)
            case FlipReuse():
                return self._flip_reuse(state, move)
            case SetScoreboard():
                return self._set_scoreboard(state, move)

    def _illegal_reason(self, state: Schedule, move: ScheduleMove) -> str:
        if self.graph.fixed[move.index]:
            return "the instruction is a wall, pinned, or next to code that cannot be seen"
        if isinstance(move, Slide | Swap):
            offset = move.offset if isinstance(move, Slide) else 1
            moved = self._moved(state, move.index, offset, keep_stalls=isinstance(move, Swap))
            if moved is None:
                return "it would leave its block"
            after = replace(state, order=moved[0], stall=moved[1])
            violation, _ = self._check(after, move.index, repair=isinstance(move, Slide))
            return VIOLATION_TEXTS.get(violation, "a stall count could not be encoded")
        return (move.error.__doc__ or "").rstrip(".")

    def _check(
        self, state: Schedule, index: int, *, repair: bool = False
    ) -> tuple[Violation, UInt8Array]:
        """Check the block of an instruction; returns the stall counts, too.

        With ``repair``, stall counts that are too short are raised in the returned array.
        """
        block = self.graph.blocks[self.graph.block_numbers[index]]
        stall = state.stall.copy()
        order = state.order[block.start : block.end]
        return check_block(block, state, order, stall, repair=repair), stall

    def _moved(
        self, state: Schedule, index: int, offset: int, *, keep_stalls: bool
    ) -> tuple[Int32Array, UInt8Array, int, int] | None:
        """(order, stall, old position, new position) after a slide; None outside the block.

        With ``keep_stalls`` (slides by 1), the two stall counts keep their positions.
        """
        block = self.graph.blocks[self.graph.block_numbers[index]]
        old_order = state.order[block.start : block.end]
        source = int(np.flatnonzero(old_order == index)[0])
        target = source + offset
        if not 0 <= target < len(old_order):
            return None
        order = state.order.copy()
        new_order = order[block.start : block.end]
        if target > source:
            new_order[source:target] = old_order[source + 1 : target + 1]
        else:
            new_order[target + 1 : source + 1] = old_order[target:source]
        new_order[target] = index
        stall = state.stall
        if keep_stalls:
            neighbour = int(old_order[target])
            stall = stall.copy()
            stall[index], stall[neighbour] = state.stall[neighbour], state.stall[index]
        return order, stall, block.start + source, block.start + target

    def _slide(
        self,
        state: Schedule,
        index: int,
        offset: int,
        *,
        keep_stalls: bool = False,
        repair: bool = False,
    ) -> Schedule | None:
        moved = self._moved(state, index, offset, keep_stalls=keep_stalls)
        if moved is None:
            return None
        order, stall, source, target = moved
        if keep_stalls:
            pair = (index, int(state.order[source + 1]))
            if not self._stalls_encodable(state, stall, pair):
                return None
        after = replace(state, order=order, stall=stall)
        violation, stall = self._check(after, index, repair=repair)
        if violation is not Violation.NONE:
            return None
        reuse = self._without_stale_reuse(state, order, source, target)
        return replace(after, stall=stall, reuse=reuse)

    def _stalls_encodable(self, state: Schedule, stall: UInt8Array, pair: tuple[int, int]) -> bool:
        """Whether two swapped instructions may change and can encode their new stall counts."""
        return not any(
            self.graph.fixed[i] or (not state.yields[i] and not 1 <= stall[i] <= 11) for i in pair
        )

    def _without_stale_reuse(
        self, state: Schedule, order: Int32Array, source: int, target: int
    ) -> UInt8Array:
        """The reuse flags, cleared for instructions that have another successor in ``order``."""
        low, high = max(min(source, target) - 1, 0), max(source, target)
        before, after = state.order[low : high + 2], order[low : high + 2]
        successor = dict(zip(before.tolist(), before[1:].tolist(), strict=False))
        stale = [
            i
            for i, j in zip(after.tolist(), after[1:].tolist(), strict=False)
            if successor.get(i) != j and state.reuse[i] and not self.graph.fixed[i]
        ]
        if not stale:
            return state.reuse
        reuse = state.reuse.copy()
        reuse[stale] = 0
        return reuse

    def _set_stall(self, state: Schedule, move: SetStall) -> Schedule | None:
        index, cycles = move.index, move.stall
        largest = 15 if state.yields[index] else 11
        if cycles == state.stall[index] or not 1 <= cycles <= largest:
            return None
        stall = state.stall.copy()
        stall[index] = cycles
        after = replace(state, stall=stall)
        return after if self._check(after, index)[0] is Violation.NONE else None

    def _flip_yield(self, state: Schedule, move: FlipYield) -> Schedule | None:
        index = move.index
        if state.yields[index]:
            if not 1 <= state.stall[index] <= 11:
                return None
        elif state.reuse[index]:
            return None
        yields = state.yields.copy()
        yields[index] ^= 1
        return replace(state, yields=yields)

    def _flip_reuse(self, state: Schedule, move: FlipReuse) -> Schedule | None:
        index, slot = move.index, move.slot
        slots = self.graph.slots
        if not state.reuse[index] >> slot & 1:
            register = slots[index, slot]
            successor = self._successor(state, index)
            if (
                register < 0
                or not self._start.reuse[index] >> slot & 1
                or state.yields[index]
                or slots[index, 3] >> slot & 1
                or successor is None
                or slots[successor, slot] != register
            ):
                return None
        reuse = state.reuse.copy()
        reuse[index] ^= 1 << slot
        return replace(state, reuse=reuse)

    def _successor(self, state: Schedule, index: int) -> int | None:
        """The next instruction of the block; None after the last one."""
        block = self.graph.blocks[self.graph.block_numbers[index]]
        order = state.order[block.start : block.end]
        position = int(np.flatnonzero(order == index)[0])
        return int(order[position + 1]) if position + 1 < len(order) else None

    def _set_scoreboard(self, state: Schedule, move: SetScoreboard) -> Schedule | None:
        index, new = move.index, move.scoreboard
        field = state.write_sb if move.write else state.read_sb
        old = int(field[index])
        use = self.graph.blocks[self.graph.block_numbers[index]].scoreboards
        waiters = use.waiters.get((index, move.write), set())
        if (
            old > 5
            or new == old
            or len(waiters) != 1
            or (index, move.write) in use.locked
            or self._asynchronous >> old & 1
            or (self._asynchronous | use.live_in) >> new & 1
        ):
            return None
        waiter = next(iter(waiters))
        if self.graph.fixed[waiter]:
            return None
        values = field.copy()
        values[index] = new
        after = replace(state, write_sb=values) if move.write else replace(state, read_sb=values)
        wait = state.wait.copy()
        wait[waiter] |= 1 << new
        if not (use.live_in >> old & 1 or use.unknown_live_in) and not self._is_needed(
            after, use, waiter, old
        ):
            wait[waiter] &= ~np.uint8(1 << old)
        after = replace(after, wait=wait)
        return after if self._check(after, index)[0] is Violation.NONE else None

    def _is_needed(self, state: Schedule, use: ScoreboardUse, waiter: int, scoreboard: int) -> bool:
        """Whether an operation of the block relies on ``waiter`` waiting for ``scoreboard``."""
        return any(
            waiter in waiters and (state.write_sb if write else state.read_sb)[index] == scoreboard
            for (index, write), waiters in use.waiters.items()
        )
