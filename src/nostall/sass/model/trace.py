"""Which blocks a warp executes: one path through the function, with loops cut short.

The rules, because a cubin does not say which way a branch goes:

- a loop runs as often as the launch says (``trips``), else as often as assumed;
- any other conditional branch goes where more working loops lie ahead (loops with matrix, shared
  or global memory instructions: so the kernel does not skip its main loop), else falls through,
  unless that ends the kernel at once; a guarded EXIT or trap does not end the kernel;
- BSYNC continues where its BSSY says; CALL enters its callee, but for a recursive one, and RET
  returns; a guarded CALL is a conditional branch (compilers leave loops by one); an indirect
  branch takes its first target.

Of a loop only a few iterations are kept.  The visits of its steady iterations carry a weight, so
that the sum of weight times duration stands for the whole loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadLaunch
from nostall.sass.model.loops import Loop
from nostall.sass.program.opcodes import Effect, Pipe
from nostall.sass.program.program import Function

MAX_INSTRUCTIONS = 100_000
"""A path stops here; only many loops inside each other, each unrolled far, come that far."""

_WORK = Effect.READ_GLOBAL | Effect.READ_SHARED
_MATRIX = (Pipe.MMA, Pipe.GMMA)

SHORT = 4
"""A last block of at most so many instructions only leaves; it does no work."""


@dataclass(frozen=True)
class Trace:
    """``visits[v]`` is [first position, end position) of the v-th block executed, ``weights[v]``
    how many executions it stands for.  ``trips`` is by loop number; ``assumed`` are the loops whose
    trip count the launch does not give; ``short`` are those that the path runs less often than
    that (it passes them by, or meets them through recursion or indirect calls); ``complete`` is
    false for a path that was stopped."""

    visits: NDArray[np.int32]
    weights: NDArray[np.float64]
    trips: Mapping[int, int]
    assumed: frozenset[int]
    short: frozenset[int]
    complete: bool

    @property
    def length(self) -> int:
        """Instructions that a warp issues."""
        return int((self.visits[:, 1] - self.visits[:, 0]).sum())


def trip_counts(
    loops: Sequence[Loop], given: Mapping[int, int], assumed: int
) -> tuple[dict[int, int], frozenset[int]]:
    """Trip count of each loop, and the loops for which it is assumed."""
    unknown = sorted(set(given) - {loop.number for loop in loops})
    negative = sorted(key for key, count in given.items() if count < 0)
    if unknown or negative:
        what = f"loops {unknown}" if unknown else f"negative counts for loops {negative}"
        raise BadLaunch(
            f"trips names {what}; the kernel has {len(loops)} loops, numbered from 0 in the order "
            "of its text, and counts are >= 0; correct `trips` in the launch"
        )
    counts = {loop.number: given.get(loop.number, assumed) for loop in loops}
    return counts, frozenset(counts) - frozenset(given)


def walk(
    function: Function,
    loops: Sequence[Loop],
    trips: Mapping[int, int],
    assumed: frozenset[int] = frozenset(),
    keep: int = 6,
) -> Trace:
    """The path through ``function``, keeping at most ``keep`` iterations of each loop."""
    walker = _Walker(function, loops, trips, keep)
    complete = walker.run()
    visits = np.array(walker.visits, dtype=np.int32).reshape(-1, 2)
    weights = np.array(walker.weights)
    run = {
        loop.number: weights[visits[:, 0] == function.blocks[loop.header].start].sum()
        for loop in loops
    }
    short = frozenset(number for number, count in run.items() if count < trips[number])
    return Trace(visits, weights, dict(trips), assumed, short, complete)


def iteration_weight(iteration: int, trips: int, keep: int) -> float:
    """How many iterations the kept iteration number ``iteration`` (from 1) stands for.

    The first ones warm up and the last one leaves; the two before the last carry the rest.
    """
    if trips <= keep or iteration > keep:
        return 1.0
    if keep <= 2:
        return float(trips - keep + 1) if iteration == keep else 1.0
    steady = min(2, keep - 2)
    if keep - steady <= iteration < keep:
        return (trips - keep + steady) / steady
    return 1.0


class _Walker:
    """Follows the rules of this module from block to block."""

    def __init__(
        self, function: Function, loops: Sequence[Loop], trips: Mapping[int, int], keep: int
    ) -> None:
        self.function = function
        self.blocks = function.blocks
        self.headers = {loop.header: loop for loop in loops}
        self.trips = trips
        self.keep = keep
        self.active: list[Loop] = []
        self.iteration: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.working = {loop.header for loop in loops if self._works(loop)}
        self.ahead: dict[tuple[int, frozenset[int]], int] = {}
        self.visits: list[tuple[int, int]] = []
        self.weights: list[float] = []
        self.seen: dict[tuple[int, int], int] = {}

    def run(self) -> bool:
        block: int | None = 0
        executed = 0
        self._enter(0)
        while block is not None:
            span = self.blocks[block]
            if executed + len(span) > MAX_INSTRUCTIONS:
                return False
            self.visits.append((span.start, span.end))
            self.weights.append(self._weight())
            executed += len(span)
            following = self._next(block)
            if following is not None:
                self._enter(following)
            block = following
        return True

    def _weight(self) -> float:
        weight = 1.0
        for loop in self.active:
            weight *= iteration_weight(
                self.iteration[loop.number], self.trips[loop.number], self.keep
            )
        return weight

    def _kept(self, loop: Loop) -> int:
        return min(self.trips[loop.number], self.keep)

    def _enter(self, block: int) -> None:
        while self.active and block not in self.active[-1].body:
            self.active.pop()
        loop = self.headers.get(block)
        if loop is None:
            return
        if loop in self.active:
            while self.active[-1] is not loop:
                self.active.pop()
            self.iteration[loop.number] += 1
        else:
            self.active.append(loop)
            self.iteration[loop.number] = 1

    def _next(self, block: int) -> int | None:
        last = self.function.instructions[self.blocks[block].end - 1]
        succ = self.blocks[block].succ
        if last.base == "CALL" and len(succ) > 1 and not last.is_guarded:
            callee = next(s for s in succ if s != block + 1)
            if all(callee != running for running, _ in self.calls):
                self.calls.append((callee, block + 1))
                return callee
            return block + 1
        if last.base == "RET" and not last.is_guarded:
            return self.calls.pop()[1] if self.calls else None
        if not succ:
            return None
        if last.base == "BSYNC":
            return self._plain(block, [s for s in succ if s != block + 1] or list(succ))
        return self._plain(block, self._within_loop(block, list(succ)))

    def _within_loop(self, block: int, succ: list[int]) -> list[int]:
        """The successors that keep to the loop's trip count."""
        if not self.active:
            return succ
        loop = self.active[-1]
        stay = [s for s in succ if s in loop.body]
        leave = [s for s in succ if s not in loop.body]
        iteration, kept = self.iteration[loop.number], self._kept(loop)
        if not leave:
            inner = [s for s in stay if s != loop.header]
            return inner or (self._exits(loop) if iteration > kept else stay)
        if not stay:
            return leave
        top_tested = block == loop.header and block not in loop.latches
        at_end = block in loop.latches or not self._tested_at_ends(loop)
        due = iteration > kept or (iteration == kept and at_end and not top_tested)
        return leave if due else stay

    def _exits(self, loop: Loop) -> list[int]:
        """Where the loop can be left; used when the path itself meets no exit."""
        return sorted({s for b in loop.body for s in self.blocks[b].succ if s not in loop.body})[:1]

    def _tested_at_ends(self, loop: Loop) -> bool:
        """Whether the header or a latch can leave the loop."""
        return any(
            s not in loop.body for b in (loop.header, *loop.latches) for s in self.blocks[b].succ
        )

    def _plain(self, block: int, succ: list[int]) -> int | None:
        """By this module's rules; each backward edge a bounded number of times."""
        if not succ:
            return None
        going_on = [s for s in succ if not self._ends_at_once(s)] or succ
        for choice in sorted(going_on, key=lambda s: (-self._loops_ahead(s), s != block + 1, s)):
            edge = (block, choice)
            if choice > block or choice in self.headers:
                return choice
            self.seen[edge] = self.seen.get(edge, 0) + 1
            if self.seen[edge] <= self.keep:
                return choice
        return None

    def _ends_at_once(self, block: int) -> bool:
        """A few instructions and then EXIT or a trap."""
        return not self.blocks[block].succ and len(self.blocks[block]) <= SHORT

    def _works(self, loop: Loop) -> bool:
        return any(
            i.pipe in _MATRIX or i.effects & _WORK
            for b in loop.body
            for i in self.function.instructions[self.blocks[b].start : self.blocks[b].end]
            if not i.never_executes
        )

    def _loops_ahead(self, block: int) -> int:
        """Working loops that can be entered from ``block`` in the present iteration of others."""
        inside = frozenset(loop.header for loop in self.active)
        found = self.ahead.get((block, inside))
        if found is None:
            seen = {block} - inside
            todo = list(seen)
            while todo:
                fresh = set(self.blocks[todo.pop()].succ) - seen - inside
                seen |= fresh
                todo.extend(fresh)
            found = len(seen & self.working)
            self.ahead[block, inside] = found
        return found
