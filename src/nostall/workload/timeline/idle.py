"""Causes of the gaps without GPU work: each cause gets the time that it covers in a gap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.workload.timeline.host_work import long_host_calls, setup_calls
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.timeline.steps import AnalysedSpan, launch_times
from nostall.workload.traces.recording import Activities, Recording

QUEUED_LAUNCHES = 8
"""A GPU for which the host has launched more activities than this does not wait for a launch."""
OUTLIER = 10.0
"""A gap that occurs once is longer than this many median gaps."""
MIN_ONCE_SHARE = 0.005
"""Share of the span from which on a gap that occurs once is told from the others."""
MIN_RECURRING = 3
"""Gaps of comparable length that show, in a trace with less than two steps, that they recur."""


@dataclass(frozen=True)
class IdleGaps:
    """Gaps without GPU work in columns of shape [gaps], and the seconds of each cause in them.

    The host had not yet launched the activity behind a gap until some moment of the gap.  Before
    that moment the first of these causes counts that covers a time: the data loader, a call that
    waits for the GPU, one long host call without a launch; the rest is other work of the host
    before the launch.  Behind it the launch call counts as launch, and a wait of work that has been
    launched as other.  The seconds of a gap sum to its length.
    """

    start: np.ndarray
    end: np.ndarray
    input: np.ndarray
    sync: np.ndarray
    host: np.ndarray
    launch: np.ndarray
    other: np.ndarray
    is_late: np.ndarray
    """Whether the activity behind the gap was launched in the gap, or none is behind it."""
    is_known: np.ndarray
    """Whether the launch of the activity behind the gap is recorded."""
    in_graph: np.ndarray
    """Whether the activities before and behind the gap are of one launch of a graph."""
    is_once: np.ndarray
    """Whether the gap is much longer than the others and does not recur."""
    waiting: np.ndarray
    """End of the time in which the activity behind the gap was not launched yet."""
    host_calls: Intervals
    """The long host calls without a launch."""

    @property
    def rest(self) -> np.ndarray:
        """Seconds that are neither the data loader nor a wait for the GPU."""
        return np.asarray(self.host + self.launch + self.other)


def idle_gaps(
    recording: Recording,
    activities: Activities,
    launches: np.ndarray,
    gaps: Intervals,
    span: AnalysedSpan,
) -> IdleGaps:
    """The gaps of one GPU; ``launches`` are the rows of the calls of its ``activities``.

    ``activities`` are sorted by start, and have no duration 0.
    """
    start, end = gaps.start, gaps.end
    behind = np.searchsorted(activities.start, end)
    is_last = behind == len(activities)
    row = np.append(launches, -1)[behind]
    called, returned = launch_times(recording, row)
    called[is_last] = returned[is_last] = end[is_last]
    is_known = np.isfinite(called)
    is_late = is_known & (called >= start)
    in_graph = ~is_last & (behind > 0) & (row >= 0) & (row == np.append(-1, launches)[behind])
    is_late &= ~in_graph
    waiting = np.where(is_late, np.minimum(called, end), np.where(is_known, start, end))
    loading, syncs, drivers = _waits(recording, launches)
    both = loading | syncs
    before = waiting - start
    # Lengths are differences of sums, which round; no part of a time may exceed it.
    by_input = np.minimum(loading.length_in(start, waiting), before)
    by_both = np.clip(both.length_in(start, waiting), by_input, before)
    late_windows = Intervals(start[is_late], waiting[is_late])
    host_calls = long_host_calls(recording, drivers, late_windows, (before - by_both)[is_late])
    by_host = np.where(is_late, (both | host_calls).length_in(start, waiting) - by_both, 0.0)
    by_host = np.clip(by_host, 0.0, before - by_both)
    # Behind the start of the launch call: a late launch takes until the activity begins, unless
    # the host had already launched much more; a launch before the gap takes until it returns.
    starts = recording.calls.start[np.unique(launches[launches >= 0])]
    ahead = np.searchsorted(starts, end) - np.searchsorted(starts, np.nan_to_num(called), "right")
    is_short = is_late & (ahead <= QUEUED_LAUNCHES)
    in_call = np.clip(np.nan_to_num(returned), waiting, end) - waiting
    in_call = np.where(is_short, end - waiting, np.where(is_known & ~in_graph, in_call, 0.0))
    unlaunched = before - by_both - by_host
    by_launch = np.where(is_known, unlaunched, 0.0) + in_call
    by_other = end - waiting - in_call + np.where(is_known, 0.0, unlaunched)
    rest = by_host + by_launch + by_other
    by_setup = setup_calls(recording, drivers).length_in(start, end)
    return IdleGaps(
        start=start,
        end=end,
        input=by_input,
        sync=by_both - by_input,
        host=by_host,
        launch=by_launch,
        other=np.maximum(by_other, 0.0),
        is_late=is_late,
        is_known=is_known,
        in_graph=in_graph,
        is_once=_occur_once(gaps, rest, by_setup, span),
        waiting=waiting,
        host_calls=host_calls,
    )


def _waits(recording: Recording, launches: np.ndarray) -> tuple[Intervals, Intervals, np.ndarray]:
    """Waits for the data loader and for the GPU, and the threads that drive the GPU.

    These threads launch its work, mark steps or load data; a wait of any other thread, for example
    of one that watches collectives, delays no launch.
    """
    calls, process = recording.calls, recording.thread_process
    launching = np.unique(calls.thread[launches[launches >= 0]])
    marking = np.unique(np.concatenate((recording.step_thread, recording.loading_thread)))
    if len(launching):
        marking = marking[np.isin(process[marking], process[launching])]
        drivers = np.union1d(launching, marking)
    else:
        drivers = np.arange(len(process))
    own = np.isin(recording.loading_thread, drivers)
    loading = Intervals.union(recording.loading[own, 0], recording.loading[own, 1])
    waits = calls.synchronizes & np.isin(calls.thread, drivers)
    return loading, Intervals.union(calls.start[waits], calls.end[waits]), drivers


def _occur_once(
    gaps: Intervals, rest: np.ndarray, by_setup: np.ndarray, span: AnalysedSpan
) -> np.ndarray:
    """Which gaps are much longer than the median gap and do not recur.

    ``rest`` are the seconds of the gaps that are neither input nor synchronisation, ``by_setup``
    those in calls that allocate memory, load code or set up a device.  A trace of several steps
    shows whether a gap recurs: then half of the steps have gaps of its length.  Otherwise it recurs
    if there are several of its length, and if no setup fills most of it.
    """
    once = np.zeros(len(rest), dtype=bool)
    positive = np.sort(rest[rest > 0])
    if not len(positive):
        return once
    median = positive[(len(positive) - 1) // 2]
    notable = rest > MIN_ONCE_SHARE * (span.end - span.begin)
    is_long = rest > OUTLIER * median
    is_setup = by_setup > rest / 2
    steps = len(span.step_starts)
    if steps == 1:  # a step begins and ends with work of the host, which every step has
        is_long &= (gaps.start > span.begin) & (gaps.end < span.end)
    step = np.searchsorted(span.step_starts, gaps.start, side="right")
    for gap in np.flatnonzero(notable & (is_long | is_setup)).tolist():
        alike = rest >= rest[gap] / 2
        if steps >= 2:
            once[gap] = is_long[gap] and len(np.unique(step[alike])) < max(2, -(-steps // 2))
        else:
            once[gap] = is_setup[gap] or int(alike.sum()) < MIN_RECURRING
    return once
