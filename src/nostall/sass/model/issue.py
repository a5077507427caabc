"""Issue engine: a compiled, event-driven simulation of one scheduler of an SM and its warps.

The scheduler issues at most one instruction per cycle. A warp may issue when the stall count of
its last instruction has passed, the scoreboards in its wait mask are 0, no barrier holds it, its
pipe is free and the queue behind the pipe has room. Of several such warps the scheduler takes the
one that issued last (greedy), unless its last instruction yielded, else the youngest.

All times are whole cycles from the start of the wave of warps.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.model.costs import GSB, Column, Server, SyncKind
from nostall.sass.schedule.arrays import Int32Array, UInt8Array

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


class Reason(IntEnum):
    """Why a warp does not issue in a cycle."""

    ISSUED = 0
    """No stall: the cycle in which the warp issues."""
    STALL_COUNT = 1
    SCOREBOARD = 2
    BARRIER = 3
    PIPE_BUSY = 4
    """The pipe is busy, or the memory or tensor queue behind it is full."""
    BANK_CONFLICT = 5
    NOT_SELECTED = 6
    """Another warp issues, or a yielding instruction leaves the slot empty."""


# Enum members as plain integers, because numba compiles those as constants.
_PIPE, _OCCUPANCY = int(Column.PIPE), int(Column.OCCUPANCY)
_SERVER, _SERVICE = int(Column.SERVER), int(Column.SERVICE)
_LATENCY, _READ_AFTER = int(Column.LATENCY), int(Column.READ)
_KIND, _ARGUMENT, _GATED_OP = int(Column.KIND), int(Column.ARGUMENT), int(Column.GATED)
_A, _B, _C = int(Column.A), int(Column.B), int(Column.C)
_COSTS = len(Column)
_STALL, _YIELDS, _WRITE, _READ, _WAIT, _CONFLICT = range(_COSTS, _COSTS + 6)
_ROW = _COSTS + 6
_DEPBAR, _BARRIER, _COPY = int(SyncKind.DEPBAR), int(SyncKind.BARRIER), int(SyncKind.COPY)
_COMMIT, _GROUP, _GSB = int(SyncKind.COMMIT), int(SyncKind.GROUP), GSB
_SERVERS, _GLOBAL, _REASONS = len(Server), int(Server.GLOBAL), len(Reason)
_PIPES = 16
_NEVER = 1 << 60
_RING = 64
_NO_BOARD = 7

# Fields of a warp.
_POS = 0  # position of the next instruction; -1 after the last one
_VISIT = 1  # number of the visit, see ``trace.Trace``
_STALLED = 2  # end of the stall count
_READY = 3  # end of the scoreboard waits
_GATE = 4  # end of the barrier
_GATED = 5  # whether the barrier holds the next instruction
_PREVIOUS = 6  # last issue
_COPIES = 7  # completion of the last asynchronous copy
_ARRIVED = 8  # warps that arrived at the barrier (in the first warp of the group)
_WARP_FIELDS = 9

# Fields of the scheduler.
_SLOT = 0  # next free issue slot
_NOW = 1  # cycle of the last issue
_LAST = 2  # warp of the last issue
_LAST_POS = 3  # position of the last issue
_YIELDED = 4  # whether the last issue yielded
_CONFLICT_END = 5  # end of the last issue's bank conflict
_SCHEDULER_FIELDS = 6


@njit(cache=True)  # type: ignore[untyped-decorator]
def arrange_rows(
    costs: Int32Array,
    order: Int32Array,
    stall: UInt8Array,
    yields: UInt8Array,
    write_sb: UInt8Array,
    read_sb: UInt8Array,
    wait: UInt8Array,
    reuse: UInt8Array,
) -> Int32Array:
    """Cost rows with the control fields, by position.

    The conflict column is 1 if three operands of an instruction are in the same of the two
    register banks (even, odd), and 2 if the predecessor's ``.reuse`` can prevent this conflict.
    """
    n = len(order)
    rows = np.empty((n, _ROW), np.int32)
    for p in range(n):
        i = order[p]
        for column in range(_COSTS):
            rows[p, column] = costs[i, column]
        rows[p, _STALL] = stall[i]
        rows[p, _YIELDS] = yields[i]
        rows[p, _WRITE] = write_sb[i]
        rows[p, _READ] = read_sb[i]
        rows[p, _WAIT] = wait[i]
        a, b, c = costs[i, _A], costs[i, _B], costs[i, _C]
        conflict = 0
        three = a >= 0 and b >= 0 and c >= 0 and a != b and b != c and a != c
        if three and ((a ^ b) | (a ^ c)) & 1 == 0:
            conflict = 1
            before = order[p - 1] if p > 0 else i
            for s in range(3):
                reused = reuse[before] >> s & 1 and p > 0
                if reused and costs[before, _A + s] == costs[i, _A + s]:
                    conflict = 2
        rows[p, _CONFLICT] = conflict
    return rows


@njit(cache=True)  # type: ignore[untyped-decorator]
def _scoreboards_clear(
    rows: Int32Array,
    p: int,
    w: int,
    zero: Int64Array,
    ring: Int64Array,
    count: Int64Array,
    now: int,
) -> int:
    """First cycle from ``now`` in which the scoreboards let warp w issue the instruction at p."""
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
def _increment(
    w: int, board: int, until: int, zero: Int64Array, ring: Int64Array, count: Int64Array
) -> None:
    """Count a scoreboard of warp w up; it counts down at ``until``, in order.

    ``zero`` is when the scoreboard is 0, ``ring`` when each of its last operations completes, and
    ``count`` the number of its operations.
    """
    zero[w, board] = max(zero[w, board], until)
    ring[w, board, count[w, board] % _RING] = zero[w, board]
    count[w, board] += 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _select(
    rows: Int32Array,
    warp: Int64Array,
    sched: Int64Array,
    pipe_free: Int64Array,
    server_free: Int64Array,
    room: Int64Array,
) -> tuple[int, int]:
    """The next issue: (cycle, warp); warp -1 if no warp can ever issue."""
    best, best_priority, cycle = -1, -2, _NEVER
    for w in range(len(warp)):
        p = warp[w, _POS]
        if p < 0:
            continue
        earliest = max(warp[w, _READY], sched[_SLOT], pipe_free[rows[p, _PIPE]])
        if warp[w, _GATED]:
            earliest = max(earliest, warp[w, _GATE])
        server = rows[p, _SERVER]
        if server:
            earliest = max(earliest, server_free[server] - room[server])
        if earliest > cycle:
            continue
        priority = w
        if w == sched[_LAST]:
            priority = -1 if sched[_YIELDED] else len(warp)
        if earliest < cycle or priority > best_priority:
            best, best_priority, cycle = w, priority, earliest
    return cycle, best if cycle < _NEVER else -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _attribute_stalls(
    warp: Int64Array,
    sched: Int64Array,
    free: int,
    conflicted: int,
    cycle: int,
    weight: float,
    cycles: Float64Array,
) -> int:
    """Add the cycles since the last issue of ``warp`` to ``cycles`` by reason.

    ``free`` is when the pipe and its queue admit the instruction; a bank conflict causes the last
    ``conflicted`` cycles of that. Returns the main reason.
    """
    start = warp[_PREVIOUS] + 1
    main, longest, until = 0, 0, 0
    for reason in range(1, 7):
        if reason == 1:
            until = warp[_STALLED]
        elif reason == 2:
            until = warp[_READY]
        elif reason == 3:
            until = warp[_GATE] if warp[_GATED] else 0
        elif reason == 4:
            until = free - conflicted
        elif reason == 5:
            until = max(free, sched[_CONFLICT_END])
        else:
            until = cycle
        until = min(until, cycle)
        if until > start:
            cycles[reason] += weight * (until - start)
            if until - start > longest:
                longest, main = until - start, reason
            start = until
    cycles[0] += weight
    return main


@njit(cache=True)  # type: ignore[untyped-decorator]
def _synchronise(
    rows: Int32Array,
    p: int,
    w: int,
    cycle: int,
    start: int,
    warp: Int64Array,
    group: int,
    barrier_delay: int,
    zero: Int64Array,
    ring: Int64Array,
    count: Int64Array,
) -> bool:
    """Set the scoreboards and barriers of an instruction that issues in ``cycle``.

    ``start`` is when its service begins. Returns whether it stops the warp at once.
    """
    done = start + rows[p, _LATENCY]
    kind = rows[p, _KIND]
    blocks = False
    if kind == _COPY:
        warp[w, _COPIES] = max(warp[w, _COPIES], done)
    elif kind == _COMMIT:
        done = max(warp[w, _COPIES], cycle + 1)
    elif kind == _GROUP:
        _increment(w, _GSB, done, zero, ring, count)
    elif kind == _BARRIER:
        first = w // group * group
        end = min(first + group, len(warp))
        blocks = rows[p, _ARGUMENT] == 0
        warp[w, _GATE] = _NEVER
        warp[first, _ARRIVED] += 1
        if warp[first, _ARRIVED] == end - first:
            warp[first, _ARRIVED] = 0
            for member in range(first, end):
                warp[member, _GATE] = cycle + barrier_delay
    if rows[p, _WRITE] < 6:
        _increment(w, rows[p, _WRITE], done, zero, ring, count)
    if rows[p, _READ] < 6:
        # Global accesses read their sources before they wait for bandwidth.
        read_start = cycle if rows[p, _SERVER] == _GLOBAL else start
        _increment(w, rows[p, _READ], read_start + rows[p, _READ_AFTER], zero, ring, count)
    return blocks


@njit(cache=True)  # type: ignore[untyped-decorator]
def _first_warps(rows: Int32Array, first: int, warps: int) -> Int64Array:
    """The fields of all warps before their first instruction, [warps, fields]."""
    warp = np.zeros((warps, _WARP_FIELDS), np.int64)
    warp[:, _POS] = first
    warp[:, _GATED] = rows[first, _GATED_OP]
    warp[:, _PREVIOUS] = -1
    return warp


@njit(cache=True)  # type: ignore[untyped-decorator]
def simulate(
    rows: Int32Array,
    order: Int32Array,
    visits: Int32Array,
    weights: Float64Array,
    warps: int,
    group: int,
    room: Int64Array,
    delays: Int64Array,
    reasons: Float64Array,
    log: Int64Array,
) -> float:
    """Weighted cycles until the last warp has finished; -1 if the warps deadlock.

    The time between two issues of the scheduler has the weight of the visit that issues: exact for
    one warp, an estimate if warps run at different speeds. ``group`` warps share a barrier; the
    queue of a server is full at ``room`` cycles of accepted work; ``delays`` are those of barrier,
    drain and yield. Unless they are empty, ``reasons`` [n, reasons] receives weighted warp cycles
    by original index, and ``log`` [issues, 4] original index, warp, cycle and main reason.
    """
    explain, logging = len(reasons) > 0, len(log) > 0
    unused = np.zeros(_REASONS, np.float64)
    zero, count = np.zeros((warps, 8), np.int64), np.zeros((warps, 8), np.int64)
    ring = np.zeros((warps, 8, _RING), np.int64)
    pipe_free, pipe_conflict = np.zeros(_PIPES, np.int64), np.zeros(_PIPES, np.int64)
    server_free = np.zeros(_SERVERS, np.int64)
    sched = np.zeros(_SCHEDULER_FIELDS, np.int64)
    sched[_LAST] = -1
    warp = _first_warps(rows, visits[0, 0], warps)
    running, issued, end, elapsed = warps, 0, 0, 0.0
    while running > 0:
        t, w = _select(rows, warp, sched, pipe_free, server_free, room)
        if w < 0:
            return -1.0
        p, v = warp[w, _POS], warp[w, _VISIT]
        pipe, server = rows[p, _PIPE], rows[p, _SERVER]
        elapsed += weights[v] * (t - sched[_NOW])
        if explain or logging:
            free = max(pipe_free[pipe], server_free[server] - room[server] if server else 0)
            into = reasons[order[p]] if explain else unused
            main = _attribute_stalls(warp[w], sched, free, pipe_conflict[pipe], t, weights[v], into)
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
                running -= 1
                continue
            p = visits[v, 0]
        warp[w, _POS] = p
        warp[w, _GATED] = 1 if blocks else rows[p, _GATED_OP]
        warp[w, _READY] = _scoreboards_clear(rows, p, w, zero, ring, count, t + gap)
    return float(elapsed + weights[-1] * (end - sched[_NOW]))
