"""The compiled engine: workers and links, event by event.

Rules.  A worker runs one operation at a time: the next of its fixed order, or, without one, the
first that is ready of backward (earliest micro-batch, then deepest stage), forward (deepest stage
that may hold one more micro-batch), weight gradients; it never idles while one is ready.
Transfers start in the order in which they become ready, each as soon as all its resources are
free; one that has to wait lets later ones that do not need the same resources pass.  A stage's
all-reduce becomes ready when its last gradients are there.

Compiled, because planners simulate thousands of plans.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]

_WAKE = -1
_NEVER = -1.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _push(times: Floats, ids: Longs, size: int, time: float, id: int) -> int:
    """Add to the heap, ordered by time and then by id; returns the new size."""
    at = size
    while at > 0:
        up = (at - 1) // 2
        if times[up] < time or (times[up] == time and ids[up] <= id):
            break
        times[at], ids[at] = times[up], ids[up]
        at = up
    times[at], ids[at] = time, id
    return size + 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _pop(times: Floats, ids: Longs, size: int) -> int:
    """Remove the first; returns the new size."""
    size -= 1
    time, id = times[size], ids[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child]
            or (times[right] == times[child] and ids[right] < ids[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and id <= ids[child]):
            break
        times[at], ids[at] = times[child], ids[child]
        at = child
    times[at], ids[at] = time, id
    return size


@njit(cache=True)  # type: ignore[untyped-decorator]
def _choose(
    worker: int,
    stages_of: Longs,
    stages_at: Longs,
    cap: Longs,
    count: Longs,
    arrived: Longs,
    micro_batches: int,
    split: bool,
) -> int:
    """The greedy policy: kind * stages + stage, or -1 when nothing is ready.

    ``count`` (5, stages): forwards started, forwards done, backwards started, backwards done,
    weight gradients started.  ``arrived`` (2, stages): inputs and gradients that are there.
    """
    stages = count.shape[1]
    best, earliest = -1, micro_batches
    for at in range(stages_at[worker], stages_at[worker + 1]):
        s = stages_of[at]
        m = count[2, s]
        if m < count[1, s] and m < arrived[1, s] and m <= earliest:
            best, earliest = stages + s, m
    if best >= 0:
        return best
    for at in range(stages_at[worker + 1] - 1, stages_at[worker] - 1, -1):
        s = stages_of[at]
        m = count[0, s]
        released = count[4, s] if split else count[3, s]
        if m < micro_batches and m < arrived[0, s] and m - released < cap[s]:
            return int(s)
    if split:
        for at in range(stages_at[worker], stages_at[worker + 1]):
            s = stages_of[at]
            if count[4, s] < count[3, s]:
                return int(2 * stages + s)
    return -1


@njit(cache=True)  # type: ignore[untyped-decorator]
def run(
    micro_batches: int,
    duration: Floats,
    worker_of: Longs,
    cap: Longs,
    split: bool,
    order: Longs,
    order_at: Longs,
    transfer_s: Floats,
    load_at: Longs,
    load_resource: Longs,
    load_s: Floats,
    resources: int,
) -> tuple[float, Floats, Floats, Longs]:
    """Simulate one iteration.

    ``duration`` (3, stages) seconds per kind; ``order`` and ``order_at`` the fixed orders, empty
    for greedy; transfers are boundaries onward (stages - 1), back (stages - 1), all-reduces
    (stages), with their loads in ``load_at[t]:load_at[t + 1]``.

    Returns the makespan (infinite for an order that blocks itself), the start of each operation
    and of each transfer (by transfer and micro-batch), -1 where it did not run, and the most
    micro-batches that each stage held at once.
    """
    stages, m_all = duration.shape[1], micro_batches
    workers = worker_of.max() + 1
    transfers = transfer_s.shape[0]
    first_reduce = 2 * (stages - 1)
    greedy = order.shape[0] == 0
    ops = 3 * stages * m_all

    stages_at = np.zeros(workers + 1, np.int64)
    for s in range(stages):
        stages_at[worker_of[s] + 1] += 1
    stages_at = np.cumsum(stages_at)
    fill = stages_at.copy()
    stages_of = np.zeros(stages, np.int64)
    for s in range(stages):
        stages_of[fill[worker_of[s]]] = s
        fill[worker_of[s]] += 1

    op_start = np.full(ops, _NEVER)
    transfer_start = np.full(transfers * m_all, _NEVER)
    count = np.zeros((5, stages), np.int64)
    arrived = np.zeros((2, stages), np.int64)
    arrived[0, 0] = m_all
    arrived[1, stages - 1] = m_all
    peak = np.zeros(stages, np.int64)
    busy = np.zeros(workers, np.bool_)
    at_order = np.zeros(workers, np.int64)
    free = np.zeros(resources + 1)
    pending = np.zeros(transfers * m_all, np.int64)
    waiting = 0
    room = ops + transfers * m_all + load_s.shape[0] * m_all + workers + 8
    times, ids = np.zeros(room), np.zeros(room, np.int64)
    size = _push(times, ids, 0, 0.0, _WAKE)
    now, makespan = 0.0, 0.0
    left = (3 if split else 2) * stages * m_all

    while size > 0:
        now = times[0]
        # 1. Everything that ends now.
        while size > 0 and times[0] == now:
            id = ids[0]
            size = _pop(times, ids, size)
            if id == _WAKE:
                continue
            makespan = now
            if id >= ops:
                t = (id - ops) // m_all
                if t < stages - 1:
                    arrived[0, t + 1] += 1
                elif t < first_reduce:
                    arrived[1, t - (stages - 1)] += 1
                continue
            left -= 1
            kind, s, m = id // (stages * m_all), (id // m_all) % stages, id % m_all
            busy[worker_of[s]] = False
            if kind == 0:
                count[1, s] += 1
                if s < stages - 1:
                    pending[waiting] = s * m_all + m
                    waiting += 1
            elif kind == 1:
                count[3, s] += 1
                if s > 0:
                    pending[waiting] = (stages - 1 + s - 1) * m_all + m
                    waiting += 1
            if m == m_all - 1 and kind == (2 if split else 1):
                pending[waiting] = (first_reduce + s) * m_all
                waiting += 1
        # 2. Transfers whose resources are free.
        kept = 0
        for i in range(waiting):
            item = pending[i]
            t = item // m_all
            blocked = False
            for k in range(load_at[t], load_at[t + 1]):
                if free[load_resource[k]] > now:
                    blocked = True
            if blocked:
                pending[kept] = item
                kept += 1
                continue
            transfer_start[item] = now
            for k in range(load_at[t], load_at[t + 1]):
                free[load_resource[k]] = now + load_s[k]
                size = _push(times, ids, size, now + load_s[k], _WAKE)
            size = _push(times, ids, size, now + transfer_s[t], ops + item)
        waiting = kept
        # 3. Workers that are idle.
        for w in range(workers):
            if busy[w]:
                continue
            if greedy:
                chosen = _choose(w, stages_of, stages_at, cap, count, arrived, m_all, split)
                if chosen < 0:
                    continue
                kind, s = chosen // stages, chosen % stages
                m = count[0, s] if kind == 0 else (count[2, s] if kind == 1 else count[4, s])
            else:
                if at_order[w] >= order_at[w + 1] - order_at[w]:
                    continue
                op = order[order_at[w] + at_order[w]]
                kind, s, m = op // (stages * m_all), (op // m_all) % stages, op % m_all
                if kind == 0 and m >= arrived[0, s]:
                    continue
                if kind == 1 and (m >= arrived[1, s] or m >= count[1, s]):
                    continue
                at_order[w] += 1
            count[0 if kind == 0 else (2 if kind == 1 else 4), s] += 1
            held = count[0, s] - (count[4, s] if split else count[3, s])
            peak[s] = max(peak[s], held)
            busy[w] = True
            op = (kind * stages + s) * m_all + m
            op_start[op] = now
            size = _push(times, ids, size, now + duration[kind, s], op)
    if left > 0:
        return np.inf, op_start, transfer_start, peak
    return makespan, op_start, transfer_start, peak
