"""Measured breakdown of the time of the host, for traces without GPU activities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.host import HostRecording

HOST_PARTS = ("data_loader", "sync", "launch", "operators", "other")
"""Parts of the time of the host; those of a timeline sum to its span."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All calls of one operator."""

    name: str
    calls: int
    self_seconds: float
    """Measured seconds without the operators that it calls."""
    seconds: float
    """Measured seconds with them."""


@dataclass(frozen=True)
class HostTimeline:
    """Measured time of the host of one trace, in seconds, over all threads.

    ``data_loader``: the program waits for its data loader.  ``sync``: a runtime call waits for the
    GPU.  ``launch``: other runtime calls.  ``operators``: any other moment in an operator.
    ``other``: Python, and threads that are idle.
    """

    recording: HostRecording
    begin: float
    span: float
    """Length of the analysed span: the recorded steps, or all events if there are no steps."""
    steps: int
    """Recorded steps in the span; 0: the trace has none."""
    parts: Mapping[str, float]
    """Seconds of each of :data:`HOST_PARTS`; a moment counts for the first one that applies."""
    operators: tuple[OperatorTime, ...]
    """The longest self time first."""


def build_host_timeline(recording: HostRecording) -> HostTimeline:
    """The timeline of the host.

    Raises :class:`~nostall.core.errors.BadTrace` if all events have duration 0.
    """
    operators, calls, loading = recording.operators, recording.calls, recording.loading
    starts = np.concatenate((operators.start, calls.start, loading[:, 0]))
    ends = np.concatenate((operators.end, calls.end, loading[:, 1]))
    first, last = float(starts.min()), float(ends.max())
    steps = recording.steps
    in_time = len(steps) and steps[0, 0] < last and steps[-1, 1] > first
    begin, end = (float(steps[0, 0]), float(steps[:, 1].max())) if in_time else (first, last)
    if not end > begin:
        raise BadTrace(
            f"{recording.path}: all events of the host have duration 0; record the trace again"
        )
    waits = calls.synchronizes
    sources = {
        "data_loader": Intervals.union(loading[:, 0], loading[:, 1]),
        "sync": Intervals.union(calls.start[waits], calls.end[waits]),
        "launch": Intervals.union(calls.start[~waits], calls.end[~waits]),
        "operators": Intervals.union(operators.start, operators.end),
    }
    covered = Intervals.empty()
    parts = {}
    for part, intervals in sources.items():
        extended = covered | intervals.clip(begin, end)
        parts[part] = extended.length - covered.length
        covered = extended
    parts["other"] = max(0.0, end - begin - covered.length)
    return HostTimeline(
        recording=recording,
        begin=begin,
        span=end - begin,
        steps=len(steps) if in_time else 0,
        parts=parts,
        operators=_operator_times(recording, begin, end),
    )


def _operator_times(recording: HostRecording, begin: float, end: float) -> tuple[OperatorTime, ...]:
    """Calls and times of each operator that starts in the span."""
    operators = recording.operators
    inside = (operators.start >= begin) & (operators.start < end)
    self_seconds = _self_seconds(operators.start, operators.end, operators.thread)
    names, counts = operators.name[inside], len(recording.names)
    calls = np.bincount(names, minlength=counts)
    own = np.bincount(names, weights=self_seconds[inside], minlength=counts)
    length = (operators.end - operators.start)[inside]
    total = np.bincount(names, weights=length, minlength=counts)
    times = [
        OperatorTime(recording.names[i], int(calls[i]), float(own[i]), float(total[i]))
        for i in np.flatnonzero(calls)
    ]
    return tuple(sorted(times, key=lambda operator: -operator.self_seconds))


def _self_seconds(start: np.ndarray, end: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """Seconds of each call without those of the calls inside it, on the same thread.

    Calls are sorted by start, the longer one first.
    """
    own = (end - start).tolist()
    starts, ends = start.tolist(), end.tolist()
    for number in np.unique(thread):
        parents: list[int] = []
        for row in np.flatnonzero(thread == number).tolist():
            while parents and ends[parents[-1]] <= starts[row]:
                parents.pop()
            if parents:
                own[parents[-1]] -= min(ends[row], ends[parents[-1]]) - starts[row]
            parents.append(row)
    return np.asarray(np.maximum(own, 0.0))
