"""Measured breakdown of the time of one GPU: seconds of each kind of work, and causes of idling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.recording import Activities, ActivityType, Recording
from nostall.workload.traces.work_kinds import WorkKind, work_kinds

TIME_PARTS = (
    "compute",
    "memory",
    "weights",
    "data",
    "copies",
    "idle_input",
    "idle_sync",
    "idle_launch",
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


@dataclass(frozen=True)
class Timeline:
    """Measured time of one GPU of one trace, in seconds.

    A gap without GPU work has one of four causes.  ``idle_input``: the host waited for its data
    loader.  ``idle_sync``: the host waited for the GPU before it launched the next activity.
    ``idle_launch``: the host launched the next activity late without such a wait.  ``idle_other``:
    the next activity was launched before the gap, or its launch is not recorded.
    """

    recording: Recording
    device: int
    begin: float
    """Start of the analysed span."""
    span: float
    """Length of the analysed span: the recorded steps, or all activities if there are no steps."""
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
    """Number of ``idle_launch`` gaps."""
    fusion_saving: float
    """Seconds saved if each run of neighbouring memory-bound kernels were one kernel that takes as
    long as the longest of them: an upper bound of the gain of fusion."""

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
    begin, end, steps = _analysed_span(recording, activities)
    activities = activities.select((activities.start < end) & (activities.end > begin))
    kinds = work_kinds(activities, recording.names)
    busy_parts, busy = _busy_parts(activities, kinds, begin, end)
    communication = _covered(activities, kinds == WorkKind.COMMUNICATION).clip(begin, end)
    computation = _covered(activities, kinds <= WorkKind.MEMORY).clip(begin, end)
    idle = _idle_time(recording, activities, busy.gaps(begin, end))
    return Timeline(
        recording=recording,
        device=device,
        begin=begin,
        span=end - begin,
        steps=steps,
        parts={**busy_parts, **idle.parts},
        communication=communication.length,
        hidden_communication=communication.overlap(computation),
        num_kernels=int((activities.type == ActivityType.KERNEL).sum()),
        num_overlapping=_num_overlapping(activities),
        on_time_gap=idle.on_time_gap,
        num_late_gaps=idle.num_late_gaps,
        fusion_saving=_fusion_saving(activities, kinds),
    )


def _covered(activities: Activities, rows: np.ndarray) -> Intervals:
    return Intervals.union(activities.start[rows], activities.end[rows])


def _analysed_span(recording: Recording, activities: Activities) -> tuple[float, float, int]:
    """(begin, end, number of steps): from the first recorded step on if GPU work follows it.

    Activities of duration 0 are no work, so they do not extend the span.
    """
    works = activities.end > activities.start
    first, last = float(activities.start[works].min()), float(activities.end[works].max())
    steps = recording.steps
    if len(steps):
        begin = max(first, float(steps[0, 0]))
        if last > begin:
            return begin, last, len(steps)
    return first, last, 0


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


@dataclass(frozen=True, slots=True)
class _IdleTime:
    """Idle seconds by cause, and the gaps; the fields are those of :class:`Timeline`."""

    parts: dict[str, float]
    num_late_gaps: int
    on_time_gap: float


def _idle_time(recording: Recording, activities: Activities, gaps: Intervals) -> _IdleTime:
    length = gaps.end - gaps.start
    launched = _next_launch(recording, activities, gaps)
    is_known = np.isfinite(launched)
    is_late = is_known & (launched > gaps.start)
    loading = Intervals.union(recording.loading[:, 0], recording.loading[:, 1])
    by_input = is_late & gaps.intersects(loading)
    calls = recording.calls
    waits = Intervals.union(calls.start[calls.synchronizes], calls.end[calls.synchronizes])
    by_sync = is_late & ~by_input & gaps.intersects(waits)
    by_launch = is_late & ~by_input & ~by_sync
    on_time = length[is_known & ~is_late]
    parts = {
        "idle_input": float(length[by_input].sum()),
        "idle_sync": float(length[by_sync].sum()),
        "idle_launch": float(length[by_launch].sum()),
        "idle_other": float(length[~is_late].sum()),
    }
    on_time_gap = float(np.median(on_time)) if len(on_time) else 0.0
    return _IdleTime(parts, int(by_launch.sum()), on_time_gap)


def _next_launch(recording: Recording, activities: Activities, gaps: Intervals) -> np.ndarray:
    """Start of the call that launched the activity after each gap; NaN if it is not recorded."""
    calls = recording.calls
    launched = np.full(len(gaps.start), np.nan)
    if not len(calls.start):
        return launched
    order = np.argsort(calls.correlation, kind="stable")
    sorted_ids = calls.correlation[order]
    next_activity = np.searchsorted(activities.start, gaps.end - 1e-12)
    for gap in np.flatnonzero(next_activity < len(activities)):
        correlation = activities.correlation[next_activity[gap]]
        row = np.searchsorted(sorted_ids, correlation)
        if correlation >= 0 and row < len(sorted_ids) and sorted_ids[row] == correlation:
            launched[gap] = calls.start[order[row]]
    return launched


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


def _fusion_saving(activities: Activities, kinds: np.ndarray) -> float:
    """``Timeline.fusion_saving``: for each run of memory-bound kernels, its time minus its longest.

    A run is on one stream, without a kernel of another kind in between.  Kernels that overlap count
    once.
    """
    kernels = activities.type == ActivityType.KERNEL
    saving = 0.0
    for stream in set(activities.stream[kernels].tolist()):
        rows = kernels & (activities.stream == stream)
        start, end = activities.start[rows], activities.end[rows]
        is_memory = kinds[rows] == WorkKind.MEMORY
        edges = np.flatnonzero(np.diff(is_memory.astype(np.int8))) + 1
        bounds = np.concatenate(([0], edges, [len(start)]))
        for low, high in pairwise(bounds.tolist()):
            if high - low > 1 and is_memory[low]:
                run = Intervals.union(start[low:high], end[low:high])
                longest = float((end - start)[low:high].max())
                saving += max(0.0, run.length - longest)
    return saving
