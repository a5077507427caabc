"""What a run of an experiment shows: for each window, how many results were right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.sass.distances.microkernels.kernel import STREAMS, Experiment
from benchmarks.sass.distances.microkernels.windows import LEAD, SAFE_DISTANCE, TAIL, Window

Words = NDArray[np.uint32]
Mask = NDArray[np.bool_]


class Records(NamedTuple):
    """What a launch stores, for each loop, pass and thread of the testing warps."""

    hashes: Words
    """Hashes of the results; shape (loops, passes, threads)."""
    cycles: Words
    """Cycles between the clock reads; same shape."""
    words: Words
    """First two words of the results; shape (loops, passes, threads, 2)."""


MIN_SENSITIVE = 0.25
"""Share of results that must differ between fresh and stale value; below it the pair is blind."""
MAX_SAMPLES = 4
"""Unexplained results of a launch that the results keep."""
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
    torn: int
    """Wrong results that mix fresh and stale words: in the operand, or in the result."""
    right: int
    """Right results that a stale value would have changed, and whose clock shows no delay."""
    delayed: int
    """Results whose clock shows a delay: void unless wrong."""
    gap: int
    """Smallest distance that the clock showed."""
    unexplained: tuple[dict[str, Any], ...] = ()
    """Samples of wrong results that are neither stale nor torn."""


class Blind(Exception):
    """The stale value changes too few results, so the experiment cannot show anything."""


def sightings(
    subject: Experiment,
    condition: Condition,
    records: Records,
    overhead: int,
    has_clock: bool = True,
) -> list[Sighting]:
    """The sightings of all windows that test a distance.

    ``overhead``: cycles between the clock reads beyond the stalls, from :func:`clock_overhead`.
    Raises :class:`Blind`.
    """
    reference, blind = records.hashes[0], records.hashes[1]
    sensitive: Mask = reference != blind
    if sensitive.mean() < MIN_SENSITIVE:
        raise Blind(f"{sensitive.mean():.0%} of the results depend on the value")
    rows: list[Sighting] = []
    for at in range(subject.comparisons, subject.count):
        window = subject.windows[at]
        wrong = records.hashes[at] != reference
        stale = wrong & (records.hashes[at] == blind)
        torn = wrong & ~stale & _torn(records, at, subject.comparisons)
        extra = overhead + window.lead - LEAD
        gaps = (
            _gaps(records.cycles[at], extra) if has_clock else np.full(wrong.shape, window.distance)
        )
        on_time = gaps <= window.distance
        rows.append(
            Sighting(
                window,
                condition,
                wrong=int(wrong.sum()),
                stale=int(stale.sum()),
                torn=int(torn.sum()),
                right=int((~wrong & sensitive & on_time).sum()),
                delayed=int((~on_time).sum()),
                gap=int(gaps.min()),
                unexplained=_samples(records, at, wrong & ~stale & ~torn),
            )
        )
    return rows


def _torn(records: Records, at: int, comparisons: int) -> Mask:
    """Results that mix fresh and stale words.

    Either the operand mixed them, as in one of the windows with stale words, or each word of the
    result is that of the reference or that of the blind window, so that the unit read the operand
    once for each word.
    """
    torn = np.zeros(records.hashes[at].shape, np.bool_)
    for comparison in records.hashes[2:comparisons]:
        torn |= records.hashes[at] == comparison
    words, fresh, stale = records.words[at], records.words[0], records.words[1]
    is_mixed: Mask = ((words == fresh) | (words == stale)).all(axis=-1)
    differs: Mask = (fresh != stale).all(axis=-1)
    return torn | (is_mixed & differs)


def _samples(records: Records, at: int, wanted: Mask) -> tuple[dict[str, Any], ...]:
    """The first of the wanted results, with the right and the stale ones."""
    return tuple(
        {
            "pass": int(turn),
            "thread": int(thread),
            "words": records.words[at, turn, thread].tolist(),
            "right": records.words[0, turn, thread].tolist(),
            "stale": records.words[1, turn, thread].tolist(),
        }
        for turn, thread in np.argwhere(wanted)[:MAX_SAMPLES]
    )


def clock_overhead(cycles: Words) -> int:
    """Cycles between the clock reads of the reference window beyond its stalls.

    Some instructions always last longer than their stall says.  Such cycles are no delay: they
    belong to the instructions of the pair at any distance.
    """
    return int(cycles[0].min()) - (LEAD + SAFE_DISTANCE + TAIL)


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
