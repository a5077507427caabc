"""Which neighbours may change places as they are: for a whole block at once, compiled.

The same rules as :func:`~nostall.sass.schedule.legality.settle_block`, looked at only where an
exchange of two neighbours could break one: a game asks for all its moves at every step, and to
settle the block once per move would take most of its time.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.schedule.graph import BlockGraph, Graph
from nostall.sass.schedule.legality import Broken, settled
from nostall.sass.schedule.state import Bytes, Schedule

Ints = NDArray[np.int32]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _exchanges(
    order: Ints,
    stall: Bytes,
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
    out: Ints,
    second: Ints,
    out_cycles: Ints,
    write_sb: Bytes,
    read_sb: Bytes,
    wait: Bytes,
    drains: NDArray[np.bool_],
    legal: NDArray[np.bool_],
) -> None:
    """``legal[p]``: positions p and p + 1 of the block may be exchanged, control words and all."""
    n = len(order)
    issue = np.zeros(n, np.int32)
    now = 0
    for p in range(n):
        issue[order[p] - start] = now
        now += stall[order[p]]
    for p in range(n - 1):
        legal[p] = False
        a, b = order[p], order[p + 1]
        la, lb = a - start, b - start
        begin = issue[la]
        moved = begin + stall[b]
        ok = after_start[lb] <= begin and now - moved >= before_end[la]
        for e in range(into[lb], into[lb + 1]):
            ok = ok and first[e] != la and issue[first[e]] + cycles[e] <= begin
        for e in range(out[la], out[la + 1]):
            ok = ok and issue[second[e]] >= moved + out_cycles[e]
        if not ok:
            continue
        for side in range(3):
            x = order[p - 1] if side == 0 and p > 0 else (b if side == 1 else a)
            y = b if side == 0 else (a if side == 1 else order[min(p + 2, n - 1)])
            if (side == 0 and p == 0) or (side == 2 and p + 2 == n):
                continue
            same = next_original[x] == y and stall[x] >= stall_original[x]
            ok = ok and (same or stall[x] >= gap[pipe[x], pipe[y]])
        # A wait in the cycle after its scoreboard is set: of b, of a, and of what follows a.
        if wait[b] and not drains[b]:
            q = p - 1
            while ok and q >= 0 and issue[order[q] - start] + 2 > begin:
                w, r = write_sb[order[q]], read_sb[order[q]]
                ok = not ((w < 6 and wait[b] >> w & 1) or (r < 6 and wait[b] >> r & 1))
                q -= 1
        if ok and wait[a] and not drains[a]:
            q = p - 1
            while ok and q >= 0 and issue[order[q] - start] + 2 > moved:
                w, r = write_sb[order[q]], read_sb[order[q]]
                ok = not ((w < 6 and wait[a] >> w & 1) or (r < 6 and wait[a] >> r & 1))
                q -= 1
            w, r = write_sb[b], read_sb[b]
            if moved < begin + 2:
                ok = ok and not ((w < 6 and wait[a] >> w & 1) or (r < 6 and wait[a] >> r & 1))
        q = p + 2
        while ok and q < n and issue[order[q] - start] < moved + 2:
            i = order[q]
            if wait[i] and not drains[i]:
                w, r = write_sb[a], read_sb[a]
                ok = not ((w < 6 and wait[i] >> w & 1) or (r < 6 and wait[i] >> r & 1))
                if issue[i - start] < begin + 2:
                    w, r = write_sb[b], read_sb[b]
                    ok = ok and not ((w < 6 and wait[i] >> w & 1) or (r < 6 and wait[i] >> r & 1))
            q += 1
        legal[p] = ok


class Adjacency:
    """Legal exchanges of neighbours in the blocks of one function."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._outgoing = [_outgoing(block) for block in graph.blocks]

    def exchanges(self, state: Schedule, number: int) -> NDArray[np.bool_]:
        """[m - 1] for a block of m instructions: may its positions p and p + 1 be exchanged?"""
        g, block = self.graph, self.graph.blocks[number]
        span = state.order[block.start : block.end]
        legal = np.zeros(max(0, len(span) - 1), dtype=np.bool_)
        if len(span) < 2:
            return legal
        if not self._settled(state, block, span):
            return self._one_by_one(state, block, span)
        _exchanges(
            span,
            state.stall,
            *g.rules(block),
            *self._outgoing[number],
            state.write_sb,
            state.read_sb,
            state.wait,
            g.drains,
            legal,
        )
        return legal

    def _one_by_one(self, state: Schedule, block: BlockGraph, span: Ints) -> NDArray[np.bool_]:
        """For a block that breaks a rule as it is (an exchange might mend it)."""
        legal = np.zeros(len(span) - 1, dtype=np.bool_)
        for p in range(len(span) - 1):
            swapped = span.copy()
            swapped[p], swapped[p + 1] = span[p + 1], span[p]
            swapped.setflags(write=False)  # as in a schedule: compiled code is made per kind
            legal[p] = self._settled(state, block, swapped)
        return legal

    def _settled(self, state: Schedule, block: BlockGraph, span: Ints) -> bool:
        return settled(self.graph, block, state, span, state.stall.copy()) is Broken.OK


def _outgoing(block: BlockGraph) -> tuple[Ints, Ints, Ints]:
    """The block's edges by their first instruction: (out, second, cycles), as into and first."""
    size = block.end - block.start
    second = np.repeat(np.arange(size, dtype=np.int32), np.diff(block.into))
    by_first = np.argsort(block.first, kind="stable")
    out = np.searchsorted(block.first[by_first], np.arange(size + 1)).astype(np.int32)
    return out, second[by_first], block.cycles[by_first]
