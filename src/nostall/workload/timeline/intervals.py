"""Sets of time intervals as sorted, disjoint arrays; everything in seconds."""

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
        """What any of the given intervals covers; they may overlap and come in any order."""
        keep = end > start
        start, end = start[keep], end[keep]
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(end[order])
        first = np.concatenate(([True], start[1:] > reach[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(start[first], reach[last])

    @property
    def length(self) -> float:
        """Total time covered."""
        return float((self.end - self.start).sum())

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.union(
            np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end))
        )

    def overlap(self, other: Intervals) -> float:
        """Time covered by both."""
        return max(0.0, self.length + other.length - (self | other).length)

    def clip(self, start: float, end: float) -> Intervals:
        """What lies between ``start`` and ``end``."""
        low, high = np.maximum(self.start, start), np.minimum(self.end, end)
        keep = high > low
        return Intervals(low[keep], high[keep])

    def gaps(self, start: float, end: float) -> Intervals:
        """What is not covered between ``start`` and ``end``."""
        inside = self.clip(start, end)
        low = np.concatenate(([start], inside.end))
        high = np.concatenate((inside.start, [end]))
        keep = high > low
        return Intervals(low[keep], high[keep])
