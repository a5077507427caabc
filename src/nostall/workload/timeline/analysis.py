"""Measured breakdown of the time of one GPU: seconds of each kind of work, and causes of idling.

Each cause of a gap without GPU work gets the time that it covers in the gap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.text.plurals import pluralize
from nostall.workload.timeline.host_work import (
    HostSpans,
    HostTime,
    Launcher,
    calls_without_launch,
    long_host_calls,
    setup_calls,
    silences,
)
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.timeline.steps import AnalysedSpan, analysed_span, launch_rows, launch_times
from nostall.workload.traces.recording import WHOLE_GRAPH, Activities, ActivityType, Recording
from nostall.workload.traces.work_kinds import WorkKind, work_kinds


def slice_shares(timeline: Timeline, slices: int) -> np.ndarray:
    """Share of each kind of work in each slice, 0 to 1, shape [kinds, slices].

    The kinds are in the order of :class:`WorkKind`.  As in ``Timeline.parts``, a moment counts for
    the first kind that runs; the rest of a slice is idle.
    """
    recording = timeline.recording
    activities = recording.activities.select(recording.activities.device == timeline.device)
    kinds = work_kinds(activities, recording.names)
    edges = timeline.begin + timeline.span * np.linspace(0, 1, slices + 1)
    covered = Intervals.empty()
    previous = np.zeros(slices)
    rows = []
    for kind in WorkKind:
        is_kind = kinds == kind
        covered = covered | Intervals.union(activities.start[is_kind], activities.end[is_kind])
        current = np.diff(covered.length_until(edges))
        rows.append(current - previous)
        previous = current
    return np.asarray(np.maximum(np.stack(rows), 0) * slices / timeline.span)


_GRAPH_LAUNCH = re.compile("Graph|CommandBuffer")
"""Names of runtime calls of CUDA, ROCm and SYCL that launch a graph."""
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
    waits: Intervals
    """The waits for the data loader and for the GPU."""
    host_calls: Intervals
    """The long host calls without a launch."""
    drivers: np.ndarray
    """The threads that drive the GPU."""

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
    in_graph = ~is_last & (behind > 0) & (row == np.append(-1, launches)[behind])
    in_graph &= np.append(_launches_graph(recording), False)[row]
    is_late &= ~in_graph
    waiting = np.where(is_late, np.minimum(called, end), np.where(is_known, start, end))
    before = waiting - start
    causes = _host_causes(recording, launches, row, Intervals(start, waiting), is_late)
    by_input, by_both, by_host, waits, host_calls, drivers = causes
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
    by_setup = setup_calls(recording, drivers, slow_launches=True).length_in(start, end)
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
        waits=waits,
        host_calls=host_calls,
        drivers=drivers,
    )


def _launches_graph(recording: Recording) -> np.ndarray:
    """Whether each call launches a graph, by its name.

    Other calls can launch several activities, too, for example a copy between two GPUs.
    """
    names = np.array([_GRAPH_LAUNCH.search(name) for name in recording.host_names], bool)
    return np.asarray(names[recording.calls.name])


def _host_causes(
    recording: Recording,
    launches: np.ndarray,
    row: np.ndarray,
    waiting: Intervals,
    is_late: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Intervals, Intervals, np.ndarray]:
    """What the host did in the times before launches, and the threads that drive the GPU.

    ``row`` are the calls that end the times ``waiting``, -1 if they are not known.  The result is
    the seconds in the data loader, those in it or in a wait for the GPU, those in long host calls,
    shape [times]; the waits; the long host calls; the threads.
    """
    loading, syncs, drivers = _waits(recording, launches)
    calls = calls_without_launch(recording, drivers)
    setup = setup_calls(recording, drivers, slow_launches=False)
    by_input, by_both, by_host = np.zeros((3, len(row)))
    pieces, waits = Intervals.empty(), Intervals.empty()
    launcher = np.append(recording.calls.thread, -1)[row]
    for thread in np.unique(launcher):
        is_own = launcher == thread
        start, end = waiting.start[is_own], waiting.end[is_own]
        delay = Launcher.of(recording, launches, int(thread))
        load, sync = delay.waits(loading), delay.waits(syncs)
        both, before = load | sync, end - start
        # Lengths are differences of sums, which round; no part of a time may exceed it.
        by_input[is_own] = own_input = np.minimum(load.length_in(start, end), before)
        by_both[is_own] = own_both = np.clip(both.length_in(start, end), own_input, before)
        late = is_late[is_own]
        windows = Intervals(start[late], end[late])
        rest = (before - own_both)[late]
        found = long_host_calls(delay.cut(calls), windows, rest)
        # Allocations come in runs, such as many calls that free memory and one that takes it.
        most = setup.length_in(windows.start, windows.end) > rest / 2
        found |= setup & Intervals(windows.start[most], windows.end[most])
        own_host = np.where(late, (both | found).length_in(start, end) - own_both, 0.0)
        by_host[is_own] = np.clip(own_host, 0.0, before - own_both)
        pieces |= found
        waits |= both & windows
    return by_input, by_both, by_host, waits, pieces, drivers


def _waits(recording: Recording, launches: np.ndarray) -> tuple[HostSpans, HostSpans, np.ndarray]:
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
    load_start, load_end = recording.loading.T
    loading = HostSpans(load_start, load_end, recording.loading_thread)
    waits = calls.synchronizes & np.isin(calls.thread, drivers)
    syncs = HostSpans(calls.start[waits], calls.end[waits], calls.thread[waits])
    return loading.select(np.isin(loading.thread, drivers)), syncs, drivers


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


TIME_PARTS = (
    "compute",
    "memory",
    "weights",
    "data",
    "copies",
    "idle_input",
    "idle_sync",
    "idle_host",
    "idle_launch",
    "idle_once",
    "idle_other",
)
"""Parts of the time of a GPU; those of a timeline sum to its span."""

_BUSY_PARTS = {
    "compute": WorkKind.COMPUTE,
    "memory": WorkKind.MEMORY,
    "weights": WorkKind.COMMUNICATION,
    "data": WorkKind.INPUT,
    "copies": WorkKind.COPY,
}
"""Kind of work of each busy part, in the order of priority for moments with several kinds."""


class OtherIdle(StrEnum):
    """Reasons of ``idle_other``."""

    QUEUED = "launched"
    """The activity behind the gap was launched before, and the GPU did not begin it."""
    GRAPH = "graph"
    """The gap is between two activities of one launch of a graph."""
    UNKNOWN = "no launch"
    """The launch of the activity behind the gap is not recorded."""


@dataclass(frozen=True, slots=True)
class SingleGap:
    """A gap that is much longer than the others and does not recur."""

    start: float
    """Seconds since the begin of the span."""
    seconds: float
    call: str | None
    """The host call that takes most of it; None: none is recorded in it."""
    call_seconds: float


@dataclass(frozen=True)
class Timeline:
    """Measured time of one GPU of one trace, in seconds.

    Each moment without GPU work has one of six causes, by what the host did before it launched the
    next activity.  ``idle_input``: it waited for its data loader.  ``idle_sync``: it waited for
    the GPU.  ``idle_host``: one host call without a launch filled most of the gap.
    ``idle_launch``: any other work of the host before the launch, and the launch.  ``idle_other``:
    the activity had been launched, or its launch is not recorded.  ``idle_once``: gaps that occur
    once, without the time in which the host waited.
    """

    recording: Recording
    device: int
    begin: float
    """Start of the analysed span."""
    span: float
    """Length of the analysed span (:func:`~nostall.workload.timeline.steps.analysed_span`)."""
    steps: int
    """Recorded steps in the span; 0: the trace has none."""
    parts: Mapping[str, float]
    """Seconds of each of :data:`TIME_PARTS`.  If several kinds of work run at a time, the first of
    compute, memory, weights, data, copies counts, so ``weights`` is exposed communication."""
    communication: float
    """Seconds of communication, exposed or hidden."""
    hidden_communication: float
    """Seconds of communication while compute or memory kernels run."""
    num_kernels: int
    num_overlapping: int
    """Kernels that overlap an earlier kernel of their stream by more than a tenth.  Streams run
    one kernel at a time, except for branches of a CUDA graph and dependent launches."""
    on_time_gap: float
    """Median gap before activities that were launched before the gap: a lower bound of gaps."""
    num_late_gaps: int
    """Number of gaps with ``idle_launch`` whose activity was launched in the gap."""
    other: Mapping[OtherIdle, float]
    """Seconds of ``idle_other`` by reason."""
    single_gaps: tuple[SingleGap, ...]
    """The gaps of ``idle_once``, the longest first."""
    longest_calls: Mapping[str, tuple[str, float]]
    """For ``idle_host`` and ``idle_launch``: the host call that takes most of that time, and its
    seconds in it; without a key: none is recorded in it."""
    silent_seconds: float
    """Seconds of ``idle_launch`` in long stretches in which the host records no call."""
    fusion_saving: float
    """Seconds saved if each run of neighbouring memory-bound kernels were one kernel that takes as
    long as the longest of them: an upper bound of the gain of fusion."""
    edges: str
    """How the edges of the span were chosen."""
    remarks: tuple[str, ...]
    """GPU events outside the span, launched before it, or without a launch, a sentence each."""

    @property
    def idle(self) -> float:
        """Seconds without GPU work."""
        return sum(v for k, v in self.parts.items() if k.startswith("idle"))

    @property
    def overlap(self) -> float:
        """Share of communication that computation hides; 1 if there is no communication."""
        return self.hidden_communication / self.communication if self.communication else 1.0


def build_timelines(recording: Recording) -> list[Timeline]:
    """The timeline of each GPU of a trace, by ascending device number.

    Raises :class:`~nostall.core.errors.BadTrace` if all activities have duration 0.
    """
    timelines = []
    for device in sorted(set(recording.activities.device.tolist())):
        rows = recording.activities.device == device
        activities = recording.activities.select(rows)
        if (activities.end > activities.start).any():
            timelines.append(_build_timeline(recording, activities, device))
    if not timelines:
        raise BadTrace(
            f"{recording.path}: all {len(recording.activities)} GPU activities have duration 0; "
            "record the trace again"
        )
    return timelines


def _build_timeline(recording: Recording, activities: Activities, device: int) -> Timeline:
    launches = launch_rows(recording, activities)
    span = analysed_span(recording, activities, launches)
    begin, end = span.begin, span.end
    inside = (activities.start < end) & (activities.end > begin)
    activities, launches = activities.select(inside), launches[inside]
    kinds = work_kinds(activities, recording.names)
    busy_parts, busy = _busy_parts(activities, kinds, begin, end)
    communication = _covered(activities, kinds == WorkKind.COMMUNICATION).clip(begin, end)
    computation = _covered(activities, kinds <= WorkKind.MEMORY).clip(begin, end)
    works = activities.end > activities.start
    gaps = idle_gaps(
        recording, activities.select(works), launches[works], busy.gaps(begin, end), span
    )
    idle, other = _idle_parts(gaps)
    single_gaps, longest_calls, silent_seconds = _host_calls(recording, gaps, span)
    return Timeline(
        recording=recording,
        device=device,
        begin=begin,
        span=end - begin,
        steps=len(span.step_starts),
        parts={**busy_parts, **idle},
        communication=communication.length,
        hidden_communication=communication.overlap(computation),
        num_kernels=int((activities.type == ActivityType.KERNEL).sum()),
        num_overlapping=_num_overlapping(activities),
        on_time_gap=_on_time_gap(gaps),
        num_late_gaps=int((gaps.is_late & ~gaps.is_once & (gaps.launch > 0)).sum()),
        other=other,
        single_gaps=single_gaps,
        longest_calls=longest_calls,
        silent_seconds=silent_seconds,
        fusion_saving=_fusion_saving(activities, kinds, recording.names),
        edges=span.edges,
        remarks=(*span.remarks, *_launch_remarks(launches, other)),
    )


def _covered(activities: Activities, rows: np.ndarray) -> Intervals:
    return Intervals.union(activities.start[rows], activities.end[rows])


def _busy_parts(
    activities: Activities, kinds: np.ndarray, begin: float, end: float
) -> tuple[dict[str, float], Intervals]:
    """Seconds of each busy part, counting each moment once, and all moments with GPU work."""
    covered = Intervals.empty()
    parts = {}
    for part, kind in _BUSY_PARTS.items():
        extended = covered | _covered(activities, kinds == kind).clip(begin, end)
        parts[part] = extended.length - covered.length
        covered = extended
    return parts, covered


def _idle_parts(gaps: IdleGaps) -> tuple[dict[str, float], dict[OtherIdle, float]]:
    """Idle seconds by cause, and those of ``idle_other`` by reason."""
    recurs = ~gaps.is_once
    reasons = {
        OtherIdle.GRAPH: gaps.in_graph,
        OtherIdle.UNKNOWN: ~gaps.is_known,
        OtherIdle.QUEUED: gaps.is_known & ~gaps.in_graph,
    }
    other = {reason: float(gaps.other[rows & recurs].sum()) for reason, rows in reasons.items()}
    parts = {
        "idle_input": float(gaps.input.sum()),
        "idle_sync": float(gaps.sync.sum()),
        "idle_host": float(gaps.host[recurs].sum()),
        "idle_launch": float(gaps.launch[recurs].sum()),
        "idle_once": float(gaps.rest[gaps.is_once].sum()),
        "idle_other": sum(other.values()),
    }
    return parts, other


def _on_time_gap(gaps: IdleGaps) -> float:
    on_time = (gaps.end - gaps.start)[gaps.is_known & ~gaps.is_late & ~gaps.is_once]
    return float(np.median(on_time)) if len(on_time) else 0.0


def _host_calls(
    recording: Recording, gaps: IdleGaps, span: AnalysedSpan
) -> tuple[tuple[SingleGap, ...], dict[str, tuple[str, float]], float]:
    """The gaps that occur once, the host calls that take most of the other late gaps, silence."""
    host = HostTime.of(recording, gaps.drivers)
    single = []
    for gap in sorted(np.flatnonzero(gaps.is_once), key=lambda gap: -gaps.rest[gap]):
        window = Intervals(gaps.start[[gap]], gaps.end[[gap]])
        call, seconds = host.longest_in(window) or (None, 0.0)
        start = float(gaps.start[gap]) - span.begin
        single.append(SingleGap(start, float(gaps.rest[gap]), call, seconds))
    late = gaps.is_late & ~gaps.is_once
    waiting = Intervals(gaps.start[late], gaps.waiting[late])
    launching = waiting - (gaps.host_calls | gaps.waits)
    windows = {"idle_host": waiting & gaps.host_calls, "idle_launch": launching}
    # A wait of another thread for the GPU does not say what the launching thread does.
    waits = np.unique(recording.calls.name[recording.calls.synchronizes])
    longest = {part: host.longest_in(window, waits) for part, window in windows.items()}
    calls = {part: call for part, call in longest.items() if call is not None}
    return tuple(single), calls, silences(recording, gaps.drivers, launching).length


def _launch_remarks(launches: np.ndarray, other: Mapping[OtherIdle, float]) -> list[str]:
    count, unknown = len(launches), int((launches < 0).sum())
    if not unknown:
        return []
    return [
        f"{unknown:,} of {pluralize(count, 'GPU event')} {'has' if unknown == 1 else 'have'} no "
        f"recorded launch; {other[OtherIdle.UNKNOWN] * 1e3:.3f} ms of idle time before them "
        "without another cause count as other"
    ]


def _num_overlapping(activities: Activities) -> int:
    """``Timeline.num_overlapping``; activities are sorted by start."""
    kernels = activities.select(activities.type == ActivityType.KERNEL)
    count = 0
    for stream in set(kernels.stream.tolist()):
        rows = kernels.stream == stream
        start, end = kernels.start[rows], kernels.end[rows]
        overlap = np.maximum.accumulate(end)[:-1] - start[1:]
        length = (end - start)[1:]
        count += int((overlap > np.maximum(0.1 * length, 1e-6)).sum())
    return count


def _fusion_saving(activities: Activities, kinds: np.ndarray, names: Sequence[str]) -> float:
    """``Timeline.fusion_saving``: for each run of memory-bound kernels, its time minus its longest.

    A run is on one stream, without a kernel of another kind or a whole graph in between.  Kernels
    that overlap count once.
    """
    kernels = activities.type == ActivityType.KERNEL
    is_graph = np.array([name.startswith(WHOLE_GRAPH) for name in names], bool)[activities.name]
    saving = 0.0
    for stream in set(activities.stream[kernels].tolist()):
        rows = kernels & (activities.stream == stream)
        start, end = activities.start[rows], activities.end[rows]
        is_memory = (kinds[rows] == WorkKind.MEMORY) & ~is_graph[rows]
        edges = np.flatnonzero(np.diff(is_memory.astype(np.int8))) + 1
        bounds = np.concatenate(([0], edges, [len(start)]))
        for low, high in pairwise(bounds.tolist()):
            if high - low > 1 and is_memory[low]:
                run = Intervals.union(start[low:high], end[low:high])
                longest = float((end - start)[low:high].max())
                saving += max(0.0, run.length - longest)
    return saving
