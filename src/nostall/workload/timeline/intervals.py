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

    def __sub__(self, other: Intervals) -> Intervals:
        """The time of these intervals that ``other`` does not cover."""
        if not len(self.start):
            return self
        return self & other.gaps(float(self.start[0]), float(self.end[-1]))

    def __and__(self, other: Intervals) -> Intervals:
        """The time that both sets cover."""
        edges = np.unique(np.concatenate((self.start, self.end, other.start, other.end)))
        low, high = edges[:-1], edges[1:]
        middle = (low + high) / 2
        both = self.contains(middle) & other.contains(middle)
        return Intervals.union(low[both], high[both])

    def contains(self, times: np.ndarray) -> np.ndarray:
        """Which of ``times`` lie in an interval, whose end does not; False for NaN."""
        row = np.searchsorted(self.start, times, side="right") - 1
        return np.asarray((row >= 0) & (times < np.append(self.end, -np.inf)[row]))

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

    def length_until(self, times: np.ndarray) -> np.ndarray:
        """Covered time before each of ``times``; shape of ``times``."""
        if not len(self.start):
            return np.zeros(len(times))
        length = self.end - self.start
        total = np.cumsum(length)
        knots = np.column_stack((self.start, self.end)).ravel()
        values = np.column_stack((total - length, total)).ravel()
        return np.asarray(np.interp(times, knots, values))

    def length_in(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Covered time between each ``start`` and its ``end``, shape [windows]."""
        inside = self.length_until(end) - self.length_until(start)
        return np.asarray(np.clip(inside, 0.0, np.maximum(end - start, 0.0)))
