"""Path of a warp through a kernel's blocks, with a few iterations for each loop.

A cubin does not say which way a branch goes, so the path follows these rules:

- A loop runs for its trip count: that of the launch (``trips``), else the assumed one.
- Any other conditional branch goes to the side from which more working loops can be reached:
  loops with matrix instructions or loads from shared or global memory. So the path does not skip
  the main loop. If both sides reach equally many, the branch falls through, unless that ends the
  kernel at once. A guarded EXIT or trap does not end the kernel.
- BSYNC continues at the target of its BSSY. CALL enters its callee, except for a recursive call;
  RET returns. A guarded CALL is a conditional branch, because compilers leave loops by it. An
  indirect branch goes to its first target.

Only a few iterations of a loop are on the path. Those in the middle carry a weight, so that the
sum of weight times duration stands for all iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadLaunch
from nostall.sass.program.blocks import Block
from nostall.sass.program.opcodes import Effect, Pipe
from nostall.sass.program.program import Function


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop; header, body and latches are block numbers."""

    number: int
    """Number of the loop in the order of the text, from 0; the key of ``LaunchSpec.trips``."""
    header: int
    body: frozenset[int]
    latches: frozenset[int]
    """Blocks that jump back to the header."""


def natural_loops(blocks: Sequence[Block], entry: int = 0) -> tuple[Loop, ...]:
    """Loops that control flow can reach from ``entry``; loops with one header are merged."""
    dominators = _dominators(blocks, entry)
    latches: dict[int, set[int]] = {}
    for block in dominators:
        for target in blocks[block].succ:
            if target in dominators[block]:
                latches.setdefault(target, set()).add(block)
    return tuple(
        Loop(number, header, _body(blocks, header, latches[header], dominators), frozenset(ends))
        for number, (header, ends) in enumerate(
            sorted(latches.items(), key=lambda item: blocks[item[0]].start)
        )
    )


def _dominators(blocks: Sequence[Block], entry: int) -> dict[int, set[int]]:
    """Block reachable from ``entry`` -> the blocks on each path to it."""
    order = _reverse_postorder(blocks, entry)
    dominators: dict[int, set[int]] = {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            before = [dominators[p] for p in blocks[block].pred if p in dominators]
            new = set.intersection(*before) | {block}
            if dominators.get(block) != new:
                dominators[block] = new
                changed = True
    return dominators


def _reverse_postorder(blocks: Sequence[Block], entry: int) -> list[int]:
    postorder: list[int] = []
    seen = {entry}
    stack = [(entry, iter(blocks[entry].succ))]
    while stack:
        block, successors = stack[-1]
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].succ)))
                break
        else:
            stack.pop()
            postorder.append(block)
    return postorder[::-1]


def _body(
    blocks: Sequence[Block], header: int, latches: set[int], reachable: dict[int, set[int]]
) -> frozenset[int]:
    """The header, and each block from which a path reaches a latch without the header."""
    body = {header}
    worklist = [latch for latch in latches if latch != header]
    body.update(worklist)
    while worklist:
        for predecessor in blocks[worklist.pop()].pred:
            if predecessor in reachable and predecessor not in body:
                body.add(predecessor)
                worklist.append(predecessor)
    return frozenset(body)


MAX_INSTRUCTIONS = 100_000
"""Length at which a path stops; only deeply nested, unrolled loops reach it."""

_LOADS = Effect.READ_GLOBAL | Effect.READ_SHARED
_MATRIX = (Pipe.MMA, Pipe.GMMA)

SHORT_EXIT = 4
"""A last block of at most this many instructions only leaves the kernel; it does no work."""


@dataclass(frozen=True)
class Trace:
    """The blocks that a warp executes, in order."""

    visits: NDArray[np.int32]
    """[visits, 2]: first position and end position of each executed block."""
    weights: NDArray[np.float64]
    """[visits]: number of executions that a visit stands for."""
    trips: Mapping[int, int]
    """Loop number -> trip count."""
    assumed_loops: frozenset[int]
    """Loops whose trip count the launch does not give."""
    short_loops: frozenset[int]
    """Loops that the path runs less often than their trip count, because it passes them by or
    enters them through recursion or indirect calls."""
    complete: bool
    """False if the path stopped at ``MAX_INSTRUCTIONS``."""

    @property
    def length(self) -> int:
        """Number of instructions that a warp issues."""
        return int((self.visits[:, 1] - self.visits[:, 0]).sum())


def trip_counts(
    loops: Sequence[Loop], launch_trips: Mapping[int, int], assumed_trips: int
) -> tuple[dict[int, int], frozenset[int]]:
    """Trip count of each loop, and the numbers of the loops for which it is assumed.

    Raises :class:`BadLaunch` for counts of unknown loops and for negative counts.
    """
    unknown = sorted(set(launch_trips) - {loop.number for loop in loops})
    negative = sorted(key for key, count in launch_trips.items() if count < 0)
    if unknown or negative:
        what = f"loops {unknown}" if unknown else f"negative counts for loops {negative}"
        raise BadLaunch(
            f"trips names {what}; the kernel has {len(loops)} loops, numbered from 0 in the order "
            "of its text, and counts are >= 0; correct `trips` in the launch"
        )
    counts = {loop.number: launch_trips.get(loop.number, assumed_trips) for loop in loops}
    return counts, frozenset(counts) - frozenset(launch_trips)


def trace_path(
    function: Function,
    loops: Sequence[Loop],
    trips: Mapping[int, int],
    assumed_loops: frozenset[int] = frozenset(),
    kept_iterations: int = 6,
) -> Trace:
    """Trace the path through ``function`` with at most ``kept_iterations`` of each loop."""
    tracer = _PathTracer(function, loops, trips, kept_iterations)
    complete = tracer.run()
    visits = np.array(tracer.visits, dtype=np.int32).reshape(-1, 2)
    weights = np.array(tracer.weights)
    executed = {
        loop.number: weights[visits[:, 0] == function.blocks[loop.header].start].sum()
        for loop in loops
    }
    short_loops = frozenset(number for number, count in executed.items() if count < trips[number])
    return Trace(visits, weights, dict(trips), assumed_loops, short_loops, complete)


def iteration_weight(iteration: int, trips: int, kept_iterations: int) -> float:
    """Number of iterations that iteration ``iteration`` (from 1) of the path stands for.

    The two before the last (one, if only three are kept) carry the weight of those that are left
    out. The first ones fill the pipes and the last one leaves the loop, so they count once.
    """
    if trips <= kept_iterations or iteration > kept_iterations:
        return 1.0
    if kept_iterations <= 2:
        return float(trips - kept_iterations + 1) if iteration == kept_iterations else 1.0
    steady = min(2, kept_iterations - 2)
    if kept_iterations - steady <= iteration < kept_iterations:
        return (trips - kept_iterations + steady) / steady
    return 1.0


class _PathTracer:
    """Follows the rules of this module from block to block."""

    def __init__(
        self,
        function: Function,
        loops: Sequence[Loop],
        trips: Mapping[int, int],
        kept_iterations: int,
    ) -> None:
        self.function = function
        self.blocks = function.blocks
        self.headers = {loop.header: loop for loop in loops}
        self.trips = trips
        self.kept_iterations = kept_iterations
        self.active: list[Loop] = []
        """Loops that contain the current block, the innermost last."""
        self.iteration: dict[int, int] = {}
        """Loop number -> current iteration, from 1."""
        self.calls: list[tuple[int, int]] = []
        """(callee, block to return to) of each call that has not returned."""
        self.working = {loop.header for loop in loops if self._does_work(loop)}
        self.reachable: dict[tuple[int, frozenset[int]], int] = {}
        """Cache of :meth:`_reachable_loops`."""
        self.visits: list[tuple[int, int]] = []
        self.weights: list[float] = []
        self.backward: dict[tuple[int, int], int] = {}
        """Backward edge that is no loop's -> number of times that the path has taken it."""

    def run(self) -> bool:
        """Trace from block 0 to the end; False if the path stops at ``MAX_INSTRUCTIONS``."""
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
            successor = self._next(block)
            if successor is not None:
                self._enter(successor)
            block = successor
        return True

    def _weight(self) -> float:
        weight = 1.0
        for loop in self.active:
            weight *= iteration_weight(
                self.iteration[loop.number], self.trips[loop.number], self.kept_iterations
            )
        return weight

    def _iterations(self, loop: Loop) -> int:
        """Iterations of a loop on the path."""
        return min(self.trips[loop.number], self.kept_iterations)

    def _enter(self, block: int) -> None:
        """Update the active loops and their iterations for the next block."""
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
        """The block after ``block``; None at the end of the kernel."""
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
            return self._choose(block, [s for s in succ if s != block + 1] or list(succ))
        return self._choose(block, self._within_trips(block, list(succ)))

    def _within_trips(self, block: int, succ: list[int]) -> list[int]:
        """The successors that agree with the trip count of the innermost loop."""
        if not self.active:
            return succ
        loop = self.active[-1]
        stay = [s for s in succ if s in loop.body]
        leave = [s for s in succ if s not in loop.body]
        iteration, iterations = self.iteration[loop.number], self._iterations(loop)
        if not leave:
            inner = [s for s in stay if s != loop.header]
            return inner or (self._exits(loop) if iteration > iterations else stay)
        if not stay:
            return leave
        top_tested = block == loop.header and block not in loop.latches
        at_end = block in loop.latches or not self._is_tested_at_ends(loop)
        due = iteration > iterations or (iteration == iterations and at_end and not top_tested)
        return leave if due else stay

    def _exits(self, loop: Loop) -> list[int]:
        """The first block after the loop, for a path that does not meet an exit; [] without."""
        return sorted({s for b in loop.body for s in self.blocks[b].succ if s not in loop.body})[:1]

    def _is_tested_at_ends(self, loop: Loop) -> bool:
        """Whether the header or a latch can leave the loop."""
        return any(
            s not in loop.body for b in (loop.header, *loop.latches) for s in self.blocks[b].succ
        )

    def _choose(self, block: int, succ: list[int]) -> int | None:
        """The successor by the rules of this module.

        A backward edge that is no loop's is taken at most ``kept_iterations`` times.
        """
        if not succ:
            return None
        choices = [s for s in succ if not self._ends_at_once(s)] or succ
        for choice in sorted(choices, key=lambda s: (-self._reachable_loops(s), s != block + 1, s)):
            edge = (block, choice)
            if choice > block or choice in self.headers:
                return choice
            self.backward[edge] = self.backward.get(edge, 0) + 1
            if self.backward[edge] <= self.kept_iterations:
                return choice
        return None

    def _ends_at_once(self, block: int) -> bool:
        """Whether a block has only a few instructions and then EXIT or a trap."""
        return not self.blocks[block].succ and len(self.blocks[block]) <= SHORT_EXIT

    def _does_work(self, loop: Loop) -> bool:
        return any(
            i.pipe in _MATRIX or i.effects & _LOADS
            for b in loop.body
            for i in self.function.instructions[self.blocks[b].start : self.blocks[b].end]
            if not i.never_executes
        )

    def _reachable_loops(self, block: int) -> int:
        """Number of working loops that a path from ``block`` can enter in this iteration."""
        inside = frozenset(loop.header for loop in self.active)
        count = self.reachable.get((block, inside))
        if count is None:
            seen = {block} - inside
            worklist = list(seen)
            while worklist:
                unseen = set(self.blocks[worklist.pop()].succ) - seen - inside
                seen |= unseen
                worklist.extend(unseen)
            count = len(seen & self.working)
            self.reachable[block, inside] = count
        return count
