"""The call on the host that launched each GPU activity."""

from __future__ import annotations

import numpy as np


def launching_calls(
    start: np.ndarray, key: np.ndarray, call_start: np.ndarray, call_key: np.ndarray
) -> np.ndarray:
    """Row of the call that launched each activity, int64; -1: it is not recorded.

    ``start`` and ``key`` have the shape [activities], ``call_start`` and ``call_key`` the shape
    [calls].  An activity and its call have the same key, for example a correlation id; negative
    keys are unknown.  Ids of several processes can be equal and ids can wrap around, so of several
    calls with the key the last one that began before the activity counts, else the first one.
    """
    rows = np.full(len(key), -1, dtype=np.int64)
    if not len(call_key):
        return rows
    order = np.lexsort((call_start, call_key))
    keys, starts = call_key[order], call_start[order]
    first = np.searchsorted(keys, key, side="left")
    count = np.searchsorted(keys, key, side="right") - first
    count[key < 0] = 0
    rows[count > 0] = order[first[count > 0]]
    for activity in np.flatnonzero(count > 1).tolist():
        low = int(first[activity])
        same = starts[low : low + int(count[activity])]
        before = int(np.searchsorted(same, start[activity], side="right"))
        rows[activity] = order[low + max(before - 1, 0)]
    return rows
