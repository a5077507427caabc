"""Compiled event simulation of one iteration: workers run operations, links carry transfers.

Rules:

- A worker runs one operation at a time and is never idle while one is ready.  With a fixed order
  it runs the next operation of that order.  Without one it takes the first ready operation of:
  backward (earliest micro-batch, then deepest stage), forward (deepest stage that may hold one
  more micro-batch), weight gradients.
- Transfers start in the order in which they become ready, each as soon as all its resources are
  free.  A transfer that has to wait does not delay later ones that need other resources.
- The all-reduce of a stage becomes ready when the stage's last gradients are computed.

The code is compiled because planners simulate thousands of plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

_RESOURCE_FREE = -1
"""Event of a resource that becomes free; other events are operations, then transfers."""
_NOT_RUN = -1.0
_NO_REFERENCE_COUNTS = {"cache": True, "_nrt": False}
"""Options of functions that run for each event.  By default a compiled function counts references
to each array that it receives, which takes longer than the work of these functions.  A function
with ``_nrt=False`` must not allocate or return arrays."""
_INLINE = {"cache": True, "inline": "always"}
"""Options of functions that are compiled as part of their caller."""


class StageArrays(NamedTuple):
    """Stages of a plan and the order of their operations, as arrays for compiled code."""

    duration: Floats
    """Seconds of forward, backward and weight gradients of one micro-batch, shape (3, stages)."""
    worker: Longs
    """Worker of each stage, shape (stages,)."""
    max_in_flight: Longs
    """Micro-batches that each stage may hold, shape (stages,); used by greedy policies only."""
    order: Longs
    """Fixed order of operations of all workers, one worker after another; empty if greedy."""
    order_start: Longs
    """Index into ``order`` at which each worker's part starts, shape (workers + 1,)."""


class TransferArrays(NamedTuple):
    """Transfers of a plan: boundaries forward (stages - 1), backward (stages - 1), all-reduces."""

    seconds: Floats
    """Seconds from the start of each transfer to its arrival, shape (transfers,)."""
    load_start: Longs
    """Index at which the loads of each transfer start, shape (transfers + 1,)."""
    load_resource: Longs
    """Resource that each load occupies."""
    load_s: Floats
    """Seconds for which each load occupies its resource."""


class _Problem(NamedTuple):
    """Constant inputs of a simulation."""

    stages: StageArrays
    transfers: TransferArrays
    worker_stages: Longs
    """Stages sorted by worker, shape (stages,)."""
    worker_start: Longs
    """Index into ``worker_stages`` at which each worker's part starts, shape (workers + 1,)."""
    stage_count: int
    micro_batches: int
    operations: int
    """3 x stages x micro-batches; events from this number on are transfers."""
    splits_backward: bool


class _State(NamedTuple):
    """Arrays that change while the simulation runs."""

    event_time: Floats
    """Times of the future events, a heap in which the earliest is first."""
    event: Longs
    """The future events: an operation or transfer that ends, or ``_RESOURCE_FREE``."""
    counts: Longs
    """Per stage, shape (5, stages): forward passes started and ended, backward passes started and
    ended, weight gradients started."""
    arrived: Longs
    """Micro-batches whose inputs, and whose gradients, have arrived; shape (2, stages)."""
    busy: Bools
    """Whether each worker runs an operation."""
    order_position: Longs
    """Number of operations of each worker's fixed order that have started."""
    resource_free: Floats
    """Time at which each resource becomes free."""
    pending: Longs
    """Queue of transfers that are ready and not started: transfer x micro-batches + micro-batch."""
    peak: Longs
    """Most micro-batches that each stage has held at once."""
    operation_start: Floats
    transfer_start: Floats


@njit(**_NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _push(times: Floats, events: Longs, size: int, time: float, event: int) -> int:
    """Add an event to the heap, ordered by time and then by number; returns the new size."""
    at = size
    while at > 0:
        parent = (at - 1) // 2
        if times[parent] < time or (times[parent] == time and events[parent] <= event):
            break
        times[at], events[at] = times[parent], events[parent]
        at = parent
    times[at], events[at] = time, event
    return size + 1


@njit(**_NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _pop(times: Floats, events: Longs, size: int) -> int:
    """Remove the first event of the heap; returns the new size."""
    size -= 1
    time, event = times[size], events[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child]
            or (times[right] == times[child] and events[right] < events[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and event <= events[child]):
            break
        times[at], events[at] = times[child], events[child]
        at = child
    times[at], events[at] = time, event
    return size


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _end_events(
    problem: _Problem, state: _State, events: int, waiting: int
) -> tuple[int, int, int, bool]:
    """End everything that ends at the time of the first event; queue transfers that become ready.

    Takes and returns the numbers of future events and of waiting transfers.  Also returns how many
    operations ended, and whether any operation or transfer ended.
    """
    stages, m_all = problem.stage_count, problem.micro_batches
    last_kind = 2 if problem.splits_backward else 1
    ended_operations, any_ended = 0, False
    now = state.event_time[0]
    while events > 0 and state.event_time[0] == now:
        event = state.event[0]
        events = _pop(state.event_time, state.event, events)
        if event == _RESOURCE_FREE:
            continue
        any_ended = True
        if event >= problem.operations:
            t = (event - problem.operations) // m_all
            if t < stages - 1:
                state.arrived[0, t + 1] += 1
            elif t < 2 * (stages - 1):
                state.arrived[1, t - (stages - 1)] += 1
            continue
        ended_operations += 1
        kind, s, m = event // (stages * m_all), (event // m_all) % stages, event % m_all
        state.busy[problem.stages.worker[s]] = False
        if kind == 0:
            state.counts[1, s] += 1
            if s < stages - 1:
                state.pending[waiting] = s * m_all + m
                waiting += 1
        elif kind == 1:
            state.counts[3, s] += 1
            if s > 0:
                state.pending[waiting] = (stages - 1 + s - 1) * m_all + m
                waiting += 1
        if m == m_all - 1 and kind == last_kind:
            state.pending[waiting] = (2 * (stages - 1) + s) * m_all
            waiting += 1
    return events, waiting, ended_operations, any_ended


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _start_transfers(
    problem: _Problem, state: _State, now: float, events: int, waiting: int
) -> tuple[int, int]:
    """Start the pending transfers whose resources are free, in the order of the queue.

    Takes and returns the numbers of future events and of waiting transfers.
    """
    transfers = problem.transfers
    blocked = 0
    for i in range(waiting):
        item = state.pending[i]
        t = item // problem.micro_batches
        is_blocked = False
        for k in range(transfers.load_start[t], transfers.load_start[t + 1]):
            if state.resource_free[transfers.load_resource[k]] > now:
                is_blocked = True
        if is_blocked:
            state.pending[blocked] = item
            blocked += 1
            continue
        state.transfer_start[item] = now
        for k in range(transfers.load_start[t], transfers.load_start[t + 1]):
            end = now + transfers.load_s[k]
            state.resource_free[transfers.load_resource[k]] = end
            events = _push(state.event_time, state.event, events, end, _RESOURCE_FREE)
        arrival = now + transfers.seconds[t]
        events = _push(state.event_time, state.event, events, arrival, problem.operations + item)
    return events, blocked


@njit(**_NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _next_greedy(problem: _Problem, state: _State, worker: int) -> int:
    """Next task of an idle worker under a greedy policy: kind * stages + stage, -1 if nothing."""
    counts = state.counts
    first, end = problem.worker_start[worker], problem.worker_start[worker + 1]
    best, earliest = -1, problem.micro_batches
    for i in range(first, end):
        s = problem.worker_stages[i]
        m = counts[2, s]
        if m < counts[1, s] and m < state.arrived[1, s] and m <= earliest:
            best, earliest = problem.stage_count + s, m
    if best >= 0:
        return best
    for i in range(end - 1, first - 1, -1):
        s = problem.worker_stages[i]
        m = counts[0, s]
        held = m - (counts[4, s] if problem.splits_backward else counts[3, s])
        is_ready = m < problem.micro_batches and m < state.arrived[0, s]
        if is_ready and held < problem.stages.max_in_flight[s]:
            return int(s)
    if problem.splits_backward:
        for i in range(first, end):
            s = problem.worker_stages[i]
            if counts[4, s] < counts[3, s]:
                return int(2 * problem.stage_count + s)
    return -1


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _next_in_order(problem: _Problem, state: _State, worker: int) -> int:
    """Next task of an idle worker by its fixed order: kind * stages + stage, -1 if not ready."""
    at = problem.stages.order_start[worker] + state.order_position[worker]
    if at >= problem.stages.order_start[worker + 1]:
        return -1
    operation = problem.stages.order[at]
    chosen, m = operation // problem.micro_batches, operation % problem.micro_batches
    kind, s = chosen // problem.stage_count, chosen % problem.stage_count
    if kind == 0 and m >= state.arrived[0, s]:
        return -1
    if kind == 1 and (m >= state.arrived[1, s] or m >= state.counts[1, s]):
        return -1
    state.order_position[worker] += 1
    return int(chosen)


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _start_operation(problem: _Problem, state: _State, chosen: int, now: float, events: int) -> int:
    """Start the next micro-batch of ``chosen`` (kind * stages + stage) on the stage's worker.

    Takes and returns the number of future events.
    """
    kind, s = chosen // problem.stage_count, chosen % problem.stage_count
    m = state.counts[2 * kind, s]
    state.counts[2 * kind, s] += 1
    released = state.counts[4, s] if problem.splits_backward else state.counts[3, s]
    state.peak[s] = max(state.peak[s], state.counts[0, s] - released)
    state.busy[problem.stages.worker[s]] = True
    operation = chosen * problem.micro_batches + m
    state.operation_start[operation] = now
    end = now + problem.stages.duration[kind, s]
    return int(_push(state.event_time, state.event, events, end, operation))


@njit(**_NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _simulate(problem: _Problem, state: _State) -> float:
    """Run all events; returns the makespan in seconds, infinite if an operation never starts."""
    is_greedy = problem.stages.order.shape[0] == 0
    kinds = 3 if problem.splits_backward else 2
    remaining = kinds * problem.stage_count * problem.micro_batches
    waiting, makespan = 0, 0.0
    events = _push(state.event_time, state.event, 0, 0.0, _RESOURCE_FREE)
    while events > 0:
        now = state.event_time[0]
        events, waiting, ended, any_ended = _end_events(problem, state, events, waiting)
        remaining -= ended
        if any_ended:
            makespan = now
        events, waiting = _start_transfers(problem, state, now, events, waiting)
        for w in range(state.busy.shape[0]):
            if state.busy[w]:
                continue
            if is_greedy:
                chosen = _next_greedy(problem, state, w)
            else:
                chosen = _next_in_order(problem, state, w)
            if chosen >= 0:
                events = _start_operation(problem, state, chosen, now, events)
    return np.inf if remaining > 0 else makespan


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _group_by_worker(worker: Longs) -> tuple[Longs, Longs]:
    """Stages sorted by worker, and the index at which the stages of each worker start."""
    counts = np.zeros(worker.max() + 2, np.int64)
    for w in worker:
        counts[w + 1] += 1
    start = np.cumsum(counts)
    position = start.copy()
    stages = np.zeros(worker.shape[0], np.int64)
    for s in range(worker.shape[0]):
        stages[position[worker[s]]] = s
        position[worker[s]] += 1
    return stages, start


@njit(**_INLINE)  # type: ignore[untyped-decorator]
def _initial_state(problem: _Problem, resources: int) -> _State:
    m_all, transfers = problem.micro_batches, problem.transfers
    workers = problem.worker_start.shape[0] - 1
    runs = transfers.seconds.shape[0] * m_all
    max_events = problem.operations + runs + transfers.load_s.shape[0] * m_all + workers + 8
    arrived = np.zeros((2, problem.stage_count), np.int64)
    arrived[0, 0] = m_all
    arrived[1, problem.stage_count - 1] = m_all
    return _State(
        np.zeros(max_events),
        np.zeros(max_events, np.int64),
        np.zeros((5, problem.stage_count), np.int64),
        arrived,
        np.zeros(workers, np.bool_),
        np.zeros(workers, np.int64),
        np.zeros(resources + 1),
        np.zeros(runs, np.int64),
        np.zeros(problem.stage_count, np.int64),
        np.full(problem.operations, _NOT_RUN),
        np.full(runs, _NOT_RUN),
    )


@njit(cache=True)  # type: ignore[untyped-decorator]
def run(
    micro_batches: int,
    splits_backward: bool,
    stages: StageArrays,
    transfers: TransferArrays,
    resources: int,
) -> tuple[float, Floats, Floats, Longs]:
    """Simulate one iteration of ``micro_batches`` micro-batches over ``resources`` resources.

    Returns the makespan in seconds (infinite if a fixed order deadlocks), the start of each
    operation, the start of each transfer by transfer and micro-batch (both -1 if not run), and the
    most micro-batches that each stage held at once.
    """
    stage_count = stages.duration.shape[1]
    worker_stages, worker_start = _group_by_worker(stages.worker)
    problem = _Problem(
        stages,
        transfers,
        worker_stages,
        worker_start,
        stage_count,
        micro_batches,
        3 * stage_count * micro_batches,
        splits_backward,
    )
    state = _initial_state(problem, resources)
    makespan = _simulate(problem, state)
    return makespan, state.operation_start, state.transfer_start, state.peak
