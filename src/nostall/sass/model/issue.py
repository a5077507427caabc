"""The compiled engine: one scheduler of an SM issuing its warps' instructions, event by event.

Rules, per cycle and scheduler: one instruction at most.  A warp may issue when the stall count of
its last instruction has passed, the scoreboards in its wait mask are 0, no barrier holds it, its
pipe is free and the queue behind the pipe has room.  Among several the last warp goes on (greedy),
unless its last instruction yielded; else the youngest is taken.

All times are whole cycles from the start of the wave.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.model.costs import GSB, Column, Kind, Server

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


class Reason(IntEnum):
    """Why a warp did not issue in a cycle; ``ISSUED`` is the cycle in which it did.

    ``PIPE_BUSY`` counts a full memory or tensor queue too, ``NOT_SELECTED`` the slot that a
    yielding instruction leaves empty.
    """

    ISSUED = 0
    STALL_COUNT = 1
    SCOREBOARD = 2
    BARRIER = 3
    PIPE_BUSY = 4
    BANK_CONFLICT = 5
    NOT_SELECTED = 6


# Plain integers, which compiled code takes as constants.
_PIPE, _OCCUPANCY = int(Column.PIPE), int(Column.OCCUPANCY)
_SERVER, _SERVICE = int(Column.SERVER), int(Column.SERVICE)
_LATENCY, _READ_AFTER = int(Column.LATENCY), int(Column.READ)
_KIND, _ARGUMENT, _GATED_OP = int(Column.KIND), int(Column.ARGUMENT), int(Column.GATED)
_A, _B, _C = int(Column.A), int(Column.B), int(Column.C)
_COSTS = len(Column)
_STALL, _YIELDS, _WRITE, _READ, _WAIT, _CONFLICT = range(_COSTS, _COSTS + 6)
_ROW = _COSTS + 6
_DEPBAR, _BARRIER, _COPY = int(Kind.DEPBAR), int(Kind.BARRIER), int(Kind.COPY)
_COMMIT, _GROUP, _GSB = int(Kind.COMMIT), int(Kind.GROUP), GSB
_SERVERS, _GLOBAL, _REASONS = len(Server), int(Server.GLOBAL), len(Reason)
_PIPES = 16
_NEVER = 1 << 60
_RING = 64
_NO_BOARD = 7

# One warp: position (-1: left), visit, end of the stall count, end of the scoreboard waits, end of
# the barrier and whether it holds the next instruction, last issue, completion of the last copy,
# arrivals (in the group's first warp).
_POS, _VISIT, _STALLED, _READY, _GATE, _GATED, _PREVIOUS, _COPIES, _ARRIVED, _WARP = range(10)
# The scheduler: next free slot, last issue's cycle, warp and position, whether it yielded, end of
# its bank conflict.
_SLOT, _NOW, _LAST, _LAST_POS, _YIELDED, _CONFLICT_END, _SCHEDULER = range(7)


@njit(cache=True)  # type: ignore[untyped-decorator]
def place(
    table: Ints,
    order: Ints,
    stall: Bytes,
    yields: Bytes,
    write_sb: Bytes,
    read_sb: Bytes,
    wait: Bytes,
    reuse: Bytes,
) -> Ints:
    """Cost rows and control words by position.

    The conflict column is 1 where three operands of an instruction lie in one of the two register
    banks (even, odd), 2 where that is so unless the predecessor's ``.reuse`` keeps one of them.
    """
    n = len(order)
    rows = np.empty((n, _ROW), np.int32)
    for p in range(n):
        i = order[p]
        for column in range(_COSTS):
            rows[p, column] = table[i, column]
        rows[p, _STALL] = stall[i]
        rows[p, _YIELDS] = yields[i]
        rows[p, _WRITE] = write_sb[i]
        rows[p, _READ] = read_sb[i]
        rows[p, _WAIT] = wait[i]
        a, b, c = table[i, _A], table[i, _B], table[i, _C]
        conflict = 0
        three = a >= 0 and b >= 0 and c >= 0 and a != b and b != c and a != c
        if three and ((a ^ b) | (a ^ c)) & 1 == 0:
            conflict = 1
            before = order[p - 1] if p > 0 else i
            for s in range(3):
                kept = reuse[before] >> s & 1 and p > 0
                if kept and table[before, _A + s] == table[i, _A + s]:
                    conflict = 2
        rows[p, _CONFLICT] = conflict
    return rows


@njit(cache=True)  # type: ignore[untyped-decorator]
def _boards_clear(
    rows: Ints, p: int, w: int, zero: Longs, ring: Longs, count: Longs, now: int
) -> int:
    """When the scoreboards let warp ``w`` issue the instruction at ``p``; at least ``now``."""
    clear = now
    mask = rows[p, _WAIT]
    if rows[p, _KIND] == _DEPBAR:
        argument = rows[p, _ARGUMENT]
        board = argument & 7
        pending = count[w, board] - (argument >> 3 & 63)
        if board != _NO_BOARD and pending > 0:
            clear = max(clear, ring[w, board, (pending - 1) % _RING])
        mask |= argument >> 9
    board = 0
    while mask:
        if mask & 1 and zero[w, board] > clear:
            clear = zero[w, board]
        mask >>= 1
        board += 1
    return clear


@njit(cache=True)  # type: ignore[untyped-decorator]
def _hold(w: int, board: int, until: int, zero: Longs, ring: Longs, count: Longs) -> None:
    """Count a scoreboard up; it counts down again at ``until``, in order."""
    zero[w, board] = max(zero[w, board], until)
    ring[w, board, count[w, board] % _RING] = zero[w, board]
    count[w, board] += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _select(
    rows: Ints, warp: Longs, sched: Longs, pipe_free: Longs, server_free: Longs, room: Longs
) -> tuple[int, int]:
    """The next issue: (cycle, warp); warp -1 when none can ever issue."""
    best, rank, cycle = -1, -2, _NEVER
    for w in range(len(warp)):
        p = warp[w, _POS]
        if p < 0:
            continue
        e = max(warp[w, _READY], sched[_SLOT], pipe_free[rows[p, _PIPE]])
        if warp[w, _GATED]:
            e = max(e, warp[w, _GATE])
        server = rows[p, _SERVER]
        if server:
            e = max(e, server_free[server] - room[server])
        if e > cycle:
            continue
        mine = w
        if w == sched[_LAST]:
            mine = -1 if sched[_YIELDED] else len(warp)
        if e < cycle or mine > rank:
            best, rank, cycle = w, mine, e
    return cycle, best if cycle < _NEVER else -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _attribute(
    rows: Ints,
    state: Longs,
    sched: Longs,
    free: int,
    conflicted: int,
    cycle: int,
    weight: float,
    cycles: Floats,
) -> int:
    """Split the cycles since the warp's last issue by reason; the main reason is returned.

    ``free`` is when the pipe and its queue admit the instruction, the last ``conflicted`` cycles
    of it owing to a bank conflict.
    """
    at = state[_PREVIOUS] + 1
    main, longest, until = 0, 0, 0
    for reason in range(1, 7):
        if reason == 1:
            until = state[_STALLED]
        elif reason == 2:
            until = state[_READY]
        elif reason == 3:
            until = state[_GATE] if state[_GATED] else 0
        elif reason == 4:
            until = free - conflicted
        elif reason == 5:
            until = max(free, sched[_CONFLICT_END])
        else:
            until = cycle
        until = min(until, cycle)
        if until > at:
            cycles[reason] += weight * (until - at)
            if until - at > longest:
                longest, main = until - at, reason
            at = until
    cycles[0] += weight
    return main


@njit(cache=True)  # type: ignore[untyped-decorator]
def _synchronise(
    rows: Ints,
    p: int,
    w: int,
    cycle: int,
    start: int,
    warp: Longs,
    group: int,
    barrier_delay: int,
    zero: Longs,
    ring: Longs,
    count: Longs,
) -> bool:
    """Scoreboards and barriers of an issued instruction; whether it stops the warp at once."""
    done = start + rows[p, _LATENCY]
    kind = rows[p, _KIND]
    blocks = False
    if kind == _COPY:
        warp[w, _COPIES] = max(warp[w, _COPIES], done)
    elif kind == _COMMIT:
        done = max(warp[w, _COPIES], cycle + 1)
    elif kind == _GROUP:
        _hold(w, _GSB, done, zero, ring, count)
    elif kind == _BARRIER:
        first = w // group * group
        end = min(first + group, len(warp))
        blocks = rows[p, _ARGUMENT] == 0
        warp[w, _GATE] = _NEVER
        warp[first, _ARRIVED] += 1
        if warp[first, _ARRIVED] == end - first:
            warp[first, _ARRIVED] = 0
            for other in range(first, end):
                warp[other, _GATE] = cycle + barrier_delay
    if rows[p, _WRITE] < 6:
        _hold(w, rows[p, _WRITE], done, zero, ring, count)
    if rows[p, _READ] < 6:
        # Global accesses leave the unit with their sources before they wait for bandwidth.
        taken = cycle if rows[p, _SERVER] == _GLOBAL else start
        _hold(w, rows[p, _READ], taken + rows[p, _READ_AFTER], zero, ring, count)
    return blocks


@njit(cache=True)  # type: ignore[untyped-decorator]
def simulate(
    rows: Ints,
    order: Ints,
    visits: Ints,
    weights: Floats,
    warps: int,
    group: int,
    room: Longs,
    delays: Longs,
    reasons: Floats,
    log: Longs,
) -> float:
    """Weighted cycles until the last warp has left; -1 when the warps wait for each other for ever.

    The time from one issue of the scheduler to the next has the weight of the visit that issues:
    exact for one warp, an estimate where warps run at different speeds.  ``group`` warps share a
    barrier; ``room`` is the accepted work, in cycles, at which the queue of each server is full;
    ``delays`` are those of barrier, drain and yield.  Where they have rows, ``reasons``
    [n, reasons] collects weighted warp cycles by original index, and ``log`` [issues, 4] index,
    warp, cycle and main reason.
    """
    explain = len(reasons) > 0
    logging = len(log) > 0
    nowhere = np.zeros(_REASONS, np.float64)
    zero = np.zeros((warps, 8), np.int64)
    count = np.zeros((warps, 8), np.int64)
    ring = np.zeros((warps, 8, _RING), np.int64)
    pipe_free, pipe_conflict = np.zeros(_PIPES, np.int64), np.zeros(_PIPES, np.int64)
    server_free = np.zeros(_SERVERS, np.int64)
    sched = np.zeros(_SCHEDULER, np.int64)
    sched[_LAST] = -1
    warp = np.zeros((warps, _WARP), np.int64)
    warp[:, _POS] = visits[0, 0]
    warp[:, _GATED] = rows[visits[0, 0], _GATED_OP]
    warp[:, _PREVIOUS] = -1
    left, issued, end, elapsed = warps, 0, 0, 0.0
    while left > 0:
        t, w = _select(rows, warp, sched, pipe_free, server_free, room)
        if w < 0:
            return -1.0
        p, v = warp[w, _POS], warp[w, _VISIT]
        pipe, server = rows[p, _PIPE], rows[p, _SERVER]
        elapsed += weights[v] * (t - sched[_NOW])
        if explain or logging:
            free = max(pipe_free[pipe], server_free[server] - room[server] if server else 0)
            into = reasons[order[p]] if explain else nowhere
            main = _attribute(rows, warp[w], sched, free, pipe_conflict[pipe], t, weights[v], into)
            if logging:
                log[issued, 0], log[issued, 1] = order[p], w
                log[issued, 2], log[issued, 3] = t, main
        issued += 1

        conflict = rows[p, _CONFLICT]
        if conflict == 2:
            conflict = 0 if sched[_LAST] == w and sched[_LAST_POS] == p - 1 else 1
        sched[_YIELDED] = rows[p, _YIELDS]
        sched[_SLOT] = t + 1 + conflict + (delays[2] if rows[p, _YIELDS] else 0)
        sched[_CONFLICT_END] = t + 1 + conflict if conflict else 0
        sched[_NOW], sched[_LAST], sched[_LAST_POS] = t, w, p
        pipe_free[pipe] = t + rows[p, _OCCUPANCY] + conflict
        pipe_conflict[pipe] = conflict
        start = t
        if server:
            start = max(t, server_free[server])
            server_free[server] = start + rows[p, _SERVICE]
        blocks = _synchronise(rows, p, w, t, start, warp, group, delays[0], zero, ring, count)

        gap = rows[p, _STALL] if rows[p, _STALL] else delays[1]
        warp[w, _PREVIOUS], warp[w, _STALLED] = t, t + gap
        p += 1
        if p == visits[v, 1]:
            v += 1
            warp[w, _VISIT] = v
            if v == len(visits):
                end = max(end, t + gap)
                if explain:
                    reasons[order[p - 1], 1] += weights[v - 1] * (gap - 1)
                warp[w, _POS] = -1
                left -= 1
                continue
            p = visits[v, 0]
        warp[w, _POS] = p
        warp[w, _GATED] = 1 if blocks else rows[p, _GATED_OP]
        warp[w, _READY] = _boards_clear(rows, p, w, zero, ring, count, t + gap)
    return float(elapsed + weights[-1] * (end - sched[_NOW]))
