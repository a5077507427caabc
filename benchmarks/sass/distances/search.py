"""Search for the true minimum distance of a pair: lower it until the result is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.sass.distances.microkernels.consumers import Values
from benchmarks.sass.distances.microkernels.kernel import STREAMS, build, experiment
from benchmarks.sass.distances.microkernels.pairs import Pair
from benchmarks.sass.distances.microkernels.windows import SPACINGS, Spacing, Window
from benchmarks.sass.distances.observe import (
    Blind,
    Condition,
    Records,
    Sighting,
    by_property,
    clock_overhead,
    largest_wrong,
    sightings,
    smallest_right,
)

MAX_DISTANCE = 44
"""Largest distance that is tried."""
BELOW, ABOVE = 1, 3
"""Distances around the largest wrong one that every condition runs."""
ALIGNMENTS = (0, 3, 5, 6)
ALONE = Condition(0, 1)
_MAX_UNEXPLAINED = 8


class Subject(Protocol):
    """What a prober must know of a kernel."""

    @property
    def count(self) -> int:
        """The number of loops, each with PASSES records."""
        ...

    @property
    def values(self) -> Values:
        """What the values of a pass are."""
        ...


class Prober(Protocol):
    """Runs a kernel of an experiment."""

    def run(self, cubin: bytes, subject: Subject, condition: Condition) -> Records:
        """What the launch stores."""
        ...


@dataclass
class PairResult:
    """All sightings of one pair."""

    pair: Pair
    rows: list[Sighting] = field(default_factory=list[Sighting])
    problem: str = ""
    overhead: int = 0
    """Cycles between the clock reads beyond the stalls."""

    def as_json(self) -> dict[str, Any]:
        """The summary that the result file has."""
        if self.problem:
            return {"pair": self.pair.name, "problem": self.problem}
        wrong = [row for row in self.rows if row.wrong]
        return {
            "pair": self.pair.name,
            "largest_wrong": largest_wrong(self.rows),
            "smallest_right": smallest_right(self.rows),
            "runs": len({row.condition for row in self.rows}),
            "windows": len(self.rows),
            "wrong_windows": len(wrong),
            "torn": sum(row.torn for row in wrong),
            "wrong_but_not_stale": sum(row.wrong - row.stale - row.torn for row in wrong),
            "unexplained": self._samples(),
            "smallest_gap": min((row.gap for row in self.rows), default=0),
            "right": sum(row.right for row in self.rows),
            "delayed": sum(row.delayed for row in self.rows),
            "clock_overhead": self.overhead,
            "largest_wrong_by": by_property(self.rows),
        }

    def _samples(self) -> list[dict[str, Any]]:
        """Unexplained results of different distances."""
        by_distance = {
            row.window.distance: {"distance": row.window.distance, **sample}
            for row in self.rows
            for sample in row.unexplained
        }
        return list(by_distance.values())[:_MAX_UNEXPLAINED]


def conditions(alignment: int, turn: int) -> tuple[Condition, ...]:
    """The launches of one module: alone, with 2 to 16 warps, and beside two streams.

    The streams rotate with ``turn``, so that four modules run all of them.
    """
    streams = [1 + (2 * turn + k) % (len(STREAMS) - 1) for k in range(2)]
    warps = (2, 8) if turn % 2 else (4, 16)
    return (
        Condition(alignment, 1),
        *(Condition(alignment, count) for count in warps),
        *(Condition(alignment, 4, stream) for stream in streams),
    )


def measure(
    pair: Pair,
    top: int,
    template: bytes,
    prober: Prober,
    alignments: Sequence[int] = ALIGNMENTS,
    has_time: Callable[[], bool] = lambda: True,
) -> PairResult:
    """Find the largest wrong distance of a pair, first alone, then under all conditions.

    ``top``: largest distance of the first run, raised while it is wrong.  ``has_time``: asked
    between modules; if False, the result has fewer conditions.
    """
    result = PairResult(pair)
    try:
        wrong = _first_run(result, top, template, prober)
        low = max(1, wrong - BELOW)
        for turn, alignment in enumerate(alignments):
            if not has_time():
                break
            wrong = _confirm(result, (low, wrong), (alignment, turn), template, prober)
    except Blind as blind:
        result.problem = f"blind: {blind}"
    return result


def _first_run(result: PairResult, top: int, template: bytes, prober: Prober) -> int:
    """Run all distances up to ``top`` alone; returns the largest wrong distance."""
    low = 1
    while True:
        windows = [Window(d, "stall") for d in range(low, top + 1)]
        _run(result, windows, [ALONE], template, prober)
        wrong = largest_wrong(result.rows)
        if wrong < top or top >= MAX_DISTANCE:
            return wrong
        low, top = top + 1, min(2 * top, MAX_DISTANCE)


def _confirm(
    result: PairResult,
    bounds: tuple[int, int],
    place: tuple[int, int],
    template: bytes,
    prober: Prober,
) -> int:
    """Run the distances around the largest wrong one under all conditions of a module.

    ``bounds``: smallest distance to run, and the largest wrong one so far.  ``place``: alignment
    and turn of the module.
    """
    low, wrong = bounds
    alignment, turn = place
    while True:
        high = wrong + ABOVE
        windows = [Window(d, s) for d in range(low, high + 1) for s in _spacings(result.pair)]
        _run(result, windows, conditions(alignment, turn), template, prober)
        wrong = max(wrong, largest_wrong(result.rows))
        if wrong < high or high >= MAX_DISTANCE:
            return wrong
        low = high + 1


def _spacings(pair: Pair) -> tuple[Spacing, ...]:
    """The spacings that a pair can have."""
    without = set() if pair.producer.file == "R" else {"reuse"}
    if pair.kind == "WAR":
        without.add("burst")
    return tuple(spacing for spacing in SPACINGS if spacing not in without)


def _run(
    result: PairResult,
    windows: Sequence[Window],
    launches: Sequence[Condition],
    template: bytes,
    prober: Prober,
) -> None:
    subject = experiment(result.pair, launches[0].alignment, windows)
    cubin = build(template, subject)
    has_clock = result.pair.consumer.form != "BRA"
    for condition in launches:
        records = prober.run(cubin, subject, condition)
        if condition == ALONE and not result.rows and has_clock:
            result.overhead = clock_overhead(records.cycles)
        result.rows += sightings(subject, condition, records, result.overhead, has_clock)
