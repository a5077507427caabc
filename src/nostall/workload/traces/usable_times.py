"""Detection of activities whose times cannot be true: zero, or damaged by a changed digit."""

from __future__ import annotations

import numpy as np

MIN_DISTANCE = 1e6
"""Smallest distance, in microseconds, of an activity that can be out of the trace's time."""
UNLAUNCHED_DISTANCE = 60e6
"""The same for an activity whose launch is not recorded, so that nothing contradicts its time."""
MAX_DURATION = 3600e6
"""Longest duration, in microseconds, that may exceed the rest of the trace tenfold."""
_MIN_RATIO = 10.0
_MAX_SHARE = 0.01


def has_usable_time(start: np.ndarray, end: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Whether the time of each activity can be true; bool, shape [activities].

    ``start`` and ``end`` are microseconds, and so is ``launch``, the start of the call that
    launched the activity (NaN: not recorded).  Activities are rejected if they are few, and if
    their distance from all others is ten times the time that the others span, and:

    - the call that launched them is not as far from the others, or
    - their launch is not recorded, and the distance is more than a minute.
    """
    usable = np.ones(len(start), dtype=bool)
    known_launches = launch[np.isfinite(launch)]
    # With very few activities, launches tell which of them are in the time of the trace.
    context = known_launches if len(start) < 3 else np.empty(0)
    for apart, distance in _far_groups(np.concatenate((start, context))):
        rows = apart[apart < len(start)]
        delay = start[rows] - launch[rows]
        agrees = np.abs(delay) < distance / 2
        is_unknown = ~np.isfinite(delay) & (distance < UNLAUNCHED_DISTANCE)
        usable[rows] &= agrees | is_unknown
    duration = end - start
    rows = np.flatnonzero(usable & (duration > MAX_DURATION))
    if len(rows) and len(rows) <= max(1, _MAX_SHARE * len(start)) and usable.sum() > len(rows):
        others = usable.copy()
        others[rows] = False
        span = end[others].max() - start[others].min()
        usable[rows] &= duration[rows] <= _MIN_RATIO * span
    return usable if usable.any() else np.ones(len(start), dtype=bool)


def _far_groups(times: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """(rows, distance) of small groups of times that are far from all others."""
    order = np.argsort(times, kind="stable")
    groups = []
    low, high = 0, len(order)
    while high - low > 1:
        current = times[order[low:high]]
        gaps = np.diff(current)
        cut = int(np.argmax(gaps)) + 1
        before, after = cut, len(current) - cut
        # Of two groups of the same size, the earlier one is rejected: a missing time is zero.
        is_first = before <= after
        core = current[cut:] if is_first else current[:cut]
        distance = float(gaps[cut - 1])
        is_far = distance > MIN_DISTANCE and distance > _MIN_RATIO * float(core[-1] - core[0])
        if not is_far or min(before, after) > max(1, _MAX_SHARE * len(times)):
            break
        rows = order[low : low + cut] if is_first else order[low + cut : high]
        groups.append((rows, distance))
        low, high = (low + cut, high) if is_first else (low, low + cut)
    return groups
