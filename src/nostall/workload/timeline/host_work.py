"""Work of the host in gaps of the GPU: long calls without a launch, and the longest call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.recording import Recording

_LAUNCHING = "Launch"
"""Part of the names of the runtime calls that launch work."""
_SETUP = (
    *("Malloc", "MemAlloc", "HostAlloc", "HostRegister", "Free", "Init", "Create", "Destroy"),
    *("Module", "Library", "FuncLoad", "LinkAdd", "LinkComplete", "Program", "Prefetch"),
)
"""Parts of the names of the runtime calls that allocate memory, load code or set up a device."""
SLOW_LAUNCH = 10.0
"""A launch call that takes this many times as long as the median one loads or sets up something."""


def long_host_calls(
    recording: Recording, threads: np.ndarray, windows: Intervals, rest: np.ndarray
) -> Intervals:
    """Host calls without a launch that fill most of a window by themselves.

    ``windows`` are the times before launches, and ``rest`` the seconds of each that no wait
    explains.  The short calls between two launches are what a launch costs the host, and a CUDA
    graph saves them; a call that takes more than half of the time before a launch is work of its
    own.  Candidates are runtime calls that launch nothing, and operators and annotations without a
    launch or a wait in them that are not a part of an operator.
    """
    start, end = _calls_without_launch(recording, threads)
    first = np.searchsorted(windows.end, start, side="right")
    meets = np.append(windows.start, np.inf)[first] < end
    pieces: list[tuple[float, float]] = []
    for low, high, window in zip(
        start[meets].tolist(), end[meets].tolist(), first[meets].tolist(), strict=True
    ):
        while window < len(windows.start) and windows.start[window] < high:
            piece = max(low, windows.start[window]), min(high, windows.end[window])
            if piece[1] - piece[0] > rest[window] / 2:
                pieces.append(piece)
            window += 1
    found = np.array(pieces, dtype=np.float64).reshape(-1, 2)
    return Intervals.union(found[:, 0], found[:, 1])


def setup_calls(recording: Recording, threads: np.ndarray) -> Intervals:
    """Runtime calls that allocate memory, load code or set up a device, and very slow launches.

    CUDA loads the code of a kernel in its first launch.
    """
    calls = recording.calls
    own = np.isin(calls.thread, threads)
    sets_up = np.array([any(part in n for part in _SETUP) for n in recording.host_names], bool)
    launches = np.array([_LAUNCHING in name for name in recording.host_names], bool)
    length, is_launch = calls.end - calls.start, launches[calls.name]
    median = float(np.median(length[is_launch])) if is_launch.any() else 0.0
    rows = own & (sets_up[calls.name] | (is_launch & (length > SLOW_LAUNCH * median)))
    return Intervals.union(calls.start[rows], calls.end[rows])


def _calls_without_launch(
    recording: Recording, threads: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of the candidates of :func:`long_host_calls`."""
    calls, host = recording.calls, recording.host
    launches = np.isin(calls.correlation, recording.activities.correlation)
    launches &= calls.correlation >= 0
    launches |= np.array([_LAUNCHING in name for name in recording.host_names], bool)[calls.name]
    idle = ~launches & ~calls.synchronizes & np.isin(calls.thread, threads)
    starts, ends = [calls.start[idle]], [calls.end[idle]]
    busy = launches | calls.synchronizes
    for thread in threads.tolist():
        rows = np.flatnonzero(host.thread == thread)
        begin, end = host.start[rows], host.end[rows]
        marks = calls.start[busy & (calls.thread == thread)]
        is_free = np.searchsorted(marks, begin) == np.searchsorted(marks, end)
        operators_end = np.where(host.is_operator[rows], end, -np.inf)
        reached = np.concatenate(([-np.inf], np.maximum.accumulate(operators_end)[:-1]))
        is_free &= reached <= begin
        starts.append(begin[is_free])
        ends.append(end[is_free])
    return np.concatenate(starts), np.concatenate(ends)


@dataclass(frozen=True)
class HostTime:
    """Time of the host in its calls, without that in the calls inside them, as segments."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    """Index into ``names``."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, recording: Recording) -> HostTime:
        """The segments of all threads."""
        calls, host = recording.calls, recording.host
        start = np.concatenate((calls.start, host.start))
        end = np.concatenate((calls.end, host.end))
        name = np.concatenate((calls.name, host.name))
        thread = np.concatenate((calls.thread, host.thread))
        segments: list[_Segment] = []
        for number in np.unique(thread):
            rows = np.flatnonzero(thread == number)
            rows = rows[np.lexsort((-end[rows], start[rows]))]
            nested = zip(start[rows].tolist(), end[rows].tolist(), name[rows].tolist(), strict=True)
            segments += _own_segments(list(nested))
        table = np.array(segments, dtype=np.float64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), recording.host_names)

    def longest_in(self, windows: Intervals) -> tuple[str, float] | None:
        """Name and seconds of the calls that take most of the windows; None: no call does."""
        if not len(self.start) or not len(windows.start):
            return None
        seconds = np.bincount(self.name, weights=windows.length_in(self.start, self.end))
        longest = int(np.argmax(seconds))
        return (self.names[longest], float(seconds[longest])) if seconds[longest] > 0 else None


_Segment = tuple[float, float, int]
"""(start, end, index of the name) of a call or of a part of it."""


def _own_segments(calls: list[_Segment]) -> list[_Segment]:
    """The parts of the calls of one thread in which no call inside them runs.

    Calls are sorted by start, the longer one first.
    """
    segments: list[_Segment] = []
    running: list[tuple[float, int]] = []
    position = 0.0
    for start, end, name in [*calls, (np.inf, np.inf, -1)]:
        while running and running[-1][0] <= start:
            stop, label = running.pop()
            segments.append((position, stop, label))
            position = max(position, stop)
        if running:
            segments.append((position, start, running[-1][1]))
            end = min(end, running[-1][0])
        position = start
        running.append((end, name))
    return [segment for segment in segments if segment[1] > segment[0]]
