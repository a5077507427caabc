"""A timeline in slices of equal length: the share of each kind of work in each slice."""

from __future__ import annotations

import numpy as np

from nostall.workload.timeline.analysis import Timeline
from nostall.workload.timeline.intervals import Intervals
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
