"""Sets of time intervals, stored as sorted disjoint arrays of seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Intervals:
    """Disjoint intervals in ascending order: ``start[i] < end[i] <= start[i + 1]``."""

    start: np.ndarray
    end: np.ndarray

    @classmethod
    def union(cls, start: np.ndarray, end: np.ndarray) -> Intervals:
        """The union of intervals that may overlap and that may be in any order."""
        keep = end > start
        start, end = start[keep], end[keep]
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, latest_end = start[order], np.maximum.accumulate(end[order])
        is_first = np.concatenate(([True], start[1:] > latest_end[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        return cls(start[is_first], latest_end[is_last])

    @classmethod
    def empty(cls) -> Intervals:
        return cls(np.empty(0), np.empty(0))

    @property
    def length(self) -> float:
        """Total covered time."""
        return float((self.end - self.start).sum())

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.union(
            np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end))
        )

    def overlap(self, other: Intervals) -> float:
        """Time that both sets cover."""
        return max(0.0, self.length + other.length - (self | other).length)

    def clip(self, start: float, end: float) -> Intervals:
        """The parts of the intervals between ``start`` and ``end``."""
        low, high = np.maximum(self.start, start), np.minimum(self.end, end)
        keep = high > low
        return Intervals(low[keep], high[keep])

    def gaps(self, start: float, end: float) -> Intervals:
        """The uncovered time between ``start`` and ``end``."""
        clipped = self.clip(start, end)
        low = np.concatenate(([start], clipped.end))
        high = np.concatenate((clipped.start, [end]))
        keep = high > low
        return Intervals(low[keep], high[keep])

    def intersects(self, other: Intervals) -> np.ndarray:
        """Whether each interval shares time with any interval of ``other``; bool, [intervals]."""
        if not len(other.start):
            return np.zeros(len(self.start), dtype=bool)
        first_after = np.searchsorted(other.end, self.start, side="right")
        starts = np.append(other.start, np.inf)
        return np.asarray(starts[first_after] < self.end)
