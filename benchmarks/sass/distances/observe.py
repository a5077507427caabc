"""What a run of an experiment shows: for each window, how many results were right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sass.distances.microkernels.kernel import STREAMS, Experiment
from benchmarks.sass.distances.microkernels.windows import LEAD, TAIL, Window

Words = NDArray[np.uint32]

MIN_SENSITIVE = 0.25
"""Share of results that must differ between fresh and stale value; below it the pair is blind."""
MIN_SAMPLES = 8
"""Right results without a delay that prove a distance under one condition."""


@dataclass(frozen=True, slots=True)
class Condition:
    """How one launch runs an experiment."""

    alignment: int
    """Position of the first clock read, modulo 8 words."""
    warps: int
    """Warps that run the windows: warp i is on partition i modulo 4 of the multiprocessor."""
    stream: int = 0
    """Index in ``STREAMS``: what the other warps of the block run."""

    def __str__(self) -> str:
        return f"alignment {self.alignment}, {self.warps} warps, others {STREAMS[self.stream]}"


@dataclass(frozen=True, slots=True)
class Sighting:
    """The results of one window under one condition."""

    window: Window
    condition: Condition
    wrong: int
    """Results that differ from the reference."""
    stale: int
    """Wrong results that equal the blind window's: the consumer read the stale value."""
    right: int
    """Right results that a stale value would have changed, and whose clock shows no delay."""
    delayed: int
    """Results whose clock shows a delay: void unless wrong."""
    gap: int
    """Smallest distance that the clock showed."""


class Blind(Exception):
    """The stale value changes too few results, so the experiment cannot show anything."""


def sightings(
    subject: Experiment,
    condition: Condition,
    hashes: Words,
    cycles: Words,
    overhead: int,
    has_clock: bool = True,
) -> list[Sighting]:
    """The sightings of all windows after reference and blind window.

    ``hashes`` and ``cycles`` have shape (windows, passes, threads).  ``overhead``: cycles between
    the clock reads beyond the stalls, from :func:`clock_overhead`.  Raises :class:`Blind`.
    """
    reference, blind = hashes[0], hashes[1]
    sensitive: NDArray[np.bool_] = reference != blind
    if sensitive.mean() < MIN_SENSITIVE:
        raise Blind(f"{sensitive.mean():.0%} of the results depend on the value")
    rows: list[Sighting] = []
    for at, window in enumerate(subject.windows[2:], start=2):
        wrong = hashes[at] != reference
        gaps = _gaps(cycles[at], overhead) if has_clock else np.full(wrong.shape, window.distance)
        on_time = gaps <= window.distance
        rows.append(
            Sighting(
                window,
                condition,
                int(wrong.sum()),
                int((wrong & (hashes[at] == blind)).sum()),
                int((~wrong & sensitive & on_time).sum()),
                int((~on_time).sum()),
                int(gaps.min()),
            )
        )
    return rows


def clock_overhead(subject: Experiment, cycles: Words) -> int:
    """The smallest difference of clock and stalls over all windows of a launch of one warp."""
    nominal = np.array([window.distance for window in subject.windows]) + LEAD + TAIL
    smallest = cycles.reshape(len(subject.windows), -1).min(axis=1).astype(np.int64)
    return int((smallest - nominal).min())


def _gaps(cycles: Words, overhead: int) -> NDArray[np.int64]:
    return cycles.astype(np.int64) - (LEAD + TAIL + overhead)


def largest_wrong(rows: Sequence[Sighting]) -> int:
    """The largest distance with a wrong result, 0 if there is none."""
    return max((row.window.distance for row in rows if row.wrong), default=0)


def smallest_right(rows: Sequence[Sighting]) -> int | None:
    """The smallest distance above every wrong one that was proven under each condition tried."""
    wrong = largest_wrong(rows)
    by_distance: dict[int, list[Sighting]] = {}
    for row in rows:
        by_distance.setdefault(row.window.distance, []).append(row)
    proven = [
        distance
        for distance, group in by_distance.items()
        if distance > wrong and any(row.right >= MIN_SAMPLES for row in group)
    ]
    return min(proven, default=None)


def by_property(rows: Sequence[Sighting]) -> dict[str, dict[str, int]]:
    """The largest wrong distance for each value of each property of the conditions."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        properties: dict[str, Any] = {
            "spacing": row.window.spacing,
            "alignment": row.condition.alignment,
            "warps": row.condition.warps,
            "stream": STREAMS[row.condition.stream],
        }
        for name, value in properties.items():
            cell = table.setdefault(name, {})
            distance = row.window.distance if row.wrong else 0
            cell[str(value)] = max(cell.get(str(value), 0), distance)
    return table
