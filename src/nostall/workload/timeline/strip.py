"""A timeline in equal slices: how much of each slice each kind of work takes."""

from __future__ import annotations

import numpy as np

from nostall.workload.timeline.analysis import Timeline
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.kinds import Kind, kinds


def strip(timeline: Timeline, slices: int) -> np.ndarray:
    """Shares between 0 and 1, [kinds, slices], in the order of :class:`Kind`.

    As in the timeline's parts each moment belongs to the first kind that works; what a slice lacks
    to 1 is idle.
    """
    recording = timeline.recording
    own = recording.activities.select(recording.activities.device == timeline.device)
    kind = kinds(own, recording.names)
    edges = timeline.begin + timeline.span * np.linspace(0, 1, slices + 1)
    covered = Intervals(np.empty(0), np.empty(0))
    before = np.zeros(slices)
    rows = []
    for one in Kind:
        covered = covered | Intervals.union(own.start[kind == one], own.end[kind == one])
        now = np.diff(_covered_until(covered, edges))
        rows.append(now - before)
        before = now
    return np.asarray(np.maximum(np.stack(rows), 0) * slices / timeline.span)


def _covered_until(intervals: Intervals, times: np.ndarray) -> np.ndarray:
    """Seconds covered before each time."""
    if not len(intervals.start):
        return np.zeros(len(times))
    length = intervals.end - intervals.start
    total = np.cumsum(length)
    knots = np.column_stack((intervals.start, intervals.end)).ravel()
    values = np.column_stack((total - length, total)).ravel()
    return np.asarray(np.interp(times, knots, values))
