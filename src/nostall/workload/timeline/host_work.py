"""Work of the host in gaps of the GPU: long calls without a launch, and the longest call."""

from __future__ import annotations

from collections.abc import Sequence
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
MIN_SILENCE = 100e-6
"""Seconds without a recorded call from which on it is unknown what the host does; Python takes
tens of microseconds between two launches."""
RESOLUTION = 1e-9
"""Seconds; less is a rounding error of a sum."""
SLOW_LAUNCH = 10.0
"""A launch call that takes this many times as long as the median one loads or sets up something."""


@dataclass(frozen=True)
class HostSpans:
    """Times of threads of the host, in columns of shape [spans]."""

    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray

    def select(self, rows: np.ndarray) -> HostSpans:
        """The rows of a boolean mask."""
        return HostSpans(self.start[rows], self.end[rows], self.thread[rows])


@dataclass(frozen=True)
class Launcher:
    """A thread that launches work of one GPU, or any thread."""

    thread: int
    """-1: any thread."""
    launches: np.ndarray
    """Start of each of its launches, ascending."""
    busy: Intervals
    """Its operators and its runtime calls."""

    @classmethod
    def of(cls, recording: Recording, launches: np.ndarray, thread: int) -> Launcher:
        """``launches`` are rows of ``recording.calls``; -1: none."""
        calls, host = recording.calls, recording.host
        rows = np.unique(launches[launches >= 0])
        own, running = calls.thread == thread, (host.thread == thread) & host.is_operator
        busy = Intervals.union(
            np.concatenate((calls.start[own], host.start[running])),
            np.concatenate((calls.end[own], host.end[running])),
        )
        return cls(thread, calls.start[rows[own[rows]]], busy)

    def cut(self, spans: HostSpans) -> HostSpans:
        """The spans without the time in which another thread delays no launch of this one.

        That is its time before a launch of this thread: the thread did not wait for it.
        """
        if self.thread < 0:
            return spans
        last = np.append(self.launches, -np.inf)[np.searchsorted(self.launches, spans.end) - 1]
        start = np.where(spans.thread == self.thread, spans.start, np.maximum(spans.start, last))
        return HostSpans(start, spans.end, spans.thread)

    def waits(self, spans: HostSpans) -> Intervals:
        """The time in which waits can delay the launches of this thread.

        It does not wait for another thread while it is in an operator or a runtime call.
        """
        cut, own = self.cut(spans), spans.thread == self.thread
        others = Intervals.union(cut.start[~own], cut.end[~own])
        return (others - self.busy) | Intervals.union(cut.start[own], cut.end[own])


def long_host_calls(calls: HostSpans, windows: Intervals, rest: np.ndarray) -> Intervals:
    """Host calls without a launch that fill most of a window by themselves.

    ``calls`` are those of :func:`calls_without_launch`, ``windows`` the times before launches, and
    ``rest`` the seconds of each that no wait explains.  The short calls between two launches are
    what a launch costs the host, and a CUDA graph saves them; a call that takes more than half of
    the time before a launch is work of its own.
    """
    start, end = calls.start, calls.end
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


def setup_calls(recording: Recording, threads: np.ndarray, *, slow_launches: bool) -> Intervals:
    """Runtime calls that allocate memory, load code or set up a device, and very slow launches.

    CUDA loads the code of a kernel in its first launch.
    """
    calls = recording.calls
    own = np.isin(calls.thread, threads)
    launches = np.array([_LAUNCHING in name for name in recording.host_names], bool)
    sets_up = np.array([any(part in n for part in _SETUP) for n in recording.host_names], bool)
    # ROCm launches with hipModuleLaunchKernel, whose name has a part of a setup call's.
    rows = own & (sets_up & ~launches)[calls.name]
    if slow_launches:
        length, is_launch = calls.end - calls.start, launches[calls.name]
        median = float(np.median(length[is_launch])) if is_launch.any() else 0.0
        rows |= own & is_launch & (length > SLOW_LAUNCH * median)
    return Intervals.union(calls.start[rows], calls.end[rows])


def silences(recording: Recording, threads: np.ndarray, windows: Intervals) -> Intervals:
    """Stretches of the windows, longer than :data:`MIN_SILENCE`, without a call of some threads.

    Waits for the GPU are no calls here: those of the threads that launch are in no window.
    """
    calls, host = recording.calls, recording.host
    own = np.isin(calls.thread, threads) & ~calls.synchronizes
    running = np.isin(host.thread, threads)
    silent = windows - Intervals.union(
        np.concatenate((calls.start[own], host.start[running])),
        np.concatenate((calls.end[own], host.end[running])),
    )
    long = silent.end - silent.start > MIN_SILENCE
    return Intervals(silent.start[long], silent.end[long])


def calls_without_launch(recording: Recording, threads: np.ndarray) -> HostSpans:
    """Candidates of :func:`long_host_calls`, of some threads.

    They are runtime calls that launch nothing, and operators and annotations without a launch or a
    wait in them that are not a part of an operator.
    """
    calls, host = recording.calls, recording.host
    launches = np.isin(calls.correlation, recording.activities.correlation)
    launches &= calls.correlation >= 0
    launches |= np.array([_LAUNCHING in name for name in recording.host_names], bool)[calls.name]
    idle = ~launches & ~calls.synchronizes & np.isin(calls.thread, threads)
    found = [(calls.start[idle], calls.end[idle], calls.thread[idle])]
    busy = launches | calls.synchronizes
    for thread in threads.tolist():
        rows = np.flatnonzero(host.thread == thread)
        begin, end = host.start[rows], host.end[rows]
        marks = calls.start[busy & (calls.thread == thread)]
        is_free = np.searchsorted(marks, begin) == np.searchsorted(marks, end)
        operators_end = np.where(host.is_operator[rows], end, -np.inf)
        reached = np.concatenate(([-np.inf], np.maximum.accumulate(operators_end)[:-1]))
        is_free &= reached <= begin
        found.append((begin[is_free], end[is_free], np.full(int(is_free.sum()), thread)))
    return HostSpans(*map(np.concatenate, zip(*found, strict=True)))


@dataclass(frozen=True)
class HostTime:
    """Time of the host in its calls, without that in the calls inside them, as segments."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    """Index into ``names``."""
    names: tuple[str, ...]

    @classmethod
    def of(cls, recording: Recording, drivers: np.ndarray) -> HostTime:
        """The segments of all threads in the processes of the threads ``drivers``."""
        calls, host = recording.calls, recording.host
        process = recording.thread_process
        own = np.flatnonzero(np.isin(process, process[drivers]))
        start = np.concatenate((calls.start, host.start))
        end = np.concatenate((calls.end, host.end))
        name = np.concatenate((calls.name, host.name))
        thread = np.concatenate((calls.thread, host.thread))
        segments: list[_Segment] = []
        for number in own:
            rows = np.flatnonzero(thread == number)
            rows = rows[np.lexsort((-end[rows], start[rows]))]
            nested = zip(start[rows].tolist(), end[rows].tolist(), name[rows].tolist(), strict=True)
            segments += _own_segments(list(nested))
        table = np.array(segments, dtype=np.float64).reshape(-1, 3)
        return cls(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), recording.host_names)

    def longest_in(
        self, windows: Intervals, other_than: Sequence[int] | np.ndarray = ()
    ) -> tuple[str, float] | None:
        """Name and seconds of the calls that take most of the windows; None: no call does.

        ``other_than`` are names that do not count.
        """
        if not len(self.start) or not len(windows.start):
            return None
        size = len(self.names)
        weights = windows.length_in(self.start, self.end)
        seconds = np.bincount(self.name, weights=weights, minlength=size)
        seconds[np.asarray(other_than, np.int64)] = 0.0
        longest = int(np.argmax(seconds))
        is_measured = seconds[longest] > RESOLUTION
        return (self.names[longest], float(seconds[longest])) if is_measured else None


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
