"""What tells two schedules apart, change by change, in words, and each change taken back."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import IllegalMove
from nostall.sass.schedule.moves import Board, Restall, ScheduleMove, Slide, Yield
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule

_NO_TAGS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between the original and a schedule; ``back`` takes it back, ``index`` is the
    instruction's original index."""

    index: int
    block: int
    text: str
    back: ScheduleMove


def changes(space: ScheduleSpace, state: Schedule, blocks: Sequence[int] = ()) -> list[Change]:
    """How ``state`` differs from the start state: places, stalls, yields, scoreboards.

    Reuse flags (cleared where neighbours change) and wait masks (which follow the scoreboards) are
    consequences and not listed.  ``blocks`` are those to look at (none: all).
    """
    start, found = space.start(), list[Change]()
    fields = ("stall", "yields", "write_sb", "read_sb")
    differ = np.any([getattr(start, f) != getattr(state, f) for f in fields], axis=0)
    for number in blocks or range(len(space.graph.blocks)):
        block = space.graph.blocks[number]
        found += _moved(space, number, state.order[block.start : block.end].tolist())
        for index in np.flatnonzero(differ[block.start : block.end]) + block.start:
            found += _retimed(space, state, number, int(index))
    return found


def without(space: ScheduleSpace, state: Schedule, change: Change) -> Schedule | None:
    """``state`` with one change taken back; None where the other changes do not allow that."""
    try:
        return space.apply(state, change.back)
    except IllegalMove:
        return None


def _moved(space: ScheduleSpace, number: int, span: list[int]) -> list[Change]:
    """Instructions that left their place among the others."""
    away = set(out_of_order(span, span))
    stayed = [index for index in span if index not in away]
    found = []
    for at, index in enumerate(span):
        if index not in away:
            continue
        before = bisect_left(stayed, index)
        to = span.index(stayed[before - 1]) + 1 if before else 0
        to -= to > at
        above = [other for other in span[at + 1 :] if other < index]
        below = [other for other in span[:at] if other > index]
        crossed, verb = (
            (above, "hoisted above") if len(above) > len(below) else (below, "sunk below")
        )
        text = f"{_name(space, index)} {verb} {_crowd(space, crossed)} in block {number}"
        found.append(Change(index, number, text, Slide(index, to - at, _NO_TAGS)))
    return found


def _retimed(space: ScheduleSpace, state: Schedule, number: int, index: int) -> list[Change]:
    before, after = space.start().control(index), state.control(index)
    name, where, found = _name(space, index), f"in block {number}", []

    def changed(text: str, back: ScheduleMove) -> None:
        found.append(Change(index, number, f"{name}: {text} {where}", back))

    if before.stall != after.stall:
        changed(f"stall {after.stall} instead of {before.stall}", _stall(index, before.stall))
    if before.yields != after.yields:
        changed("yields" if after.yields else "no longer yields", Yield(index, _NO_TAGS))
    for write, kind in ((True, "write"), (False, "read")):
        old = before.write_sb if write else before.read_sb
        new = after.write_sb if write else after.read_sb
        if old != new:
            text = f"{kind} scoreboard {new} instead of {old}"
            changed(text, Board(index, write, old, _NO_TAGS))
    return found


def _stall(index: int, cycles: int) -> Restall:
    return Restall(index, cycles, _NO_TAGS)


def _name(space: ScheduleSpace, index: int) -> str:
    return f"{space.function.instructions[index].base} #{index}"


def _crowd(space: ScheduleSpace, indices: Sequence[int]) -> str:
    """Instructions that were passed: how many of the commonest kind, and how many others."""
    kinds = Counter(space.function.instructions[index].base for index in indices)
    kind, count = kinds.most_common(1)[0]
    others = len(indices) - count
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{count} {kind}{more}"


def out_of_order(items: Sequence[int], places: Sequence[int]) -> list[int]:
    """The fewest items whose removal leaves ``places`` increasing.

    A slide by ten positions displaces ten neighbours by one; only the slid item is reported.
    """
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for at, place in enumerate(places):
        length = bisect_left(tails, place)
        before.append(ends[length - 1] if length else -1)
        if length == len(tails):
            tails.append(place)
            ends.append(at)
        else:
            tails[length], ends[length] = place, at
    kept: set[int] = set()
    at = ends[-1] if ends else -1
    while at >= 0:
        kept.add(at)
        at = before[at]
    return [item for at, item in enumerate(items) if at not in kept]
