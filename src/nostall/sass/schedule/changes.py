"""Differences between a schedule and the original, in words, each with the move that undoes it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import IllegalMove
from nostall.core.space import NO_TAGS
from nostall.sass.schedule.moves import FlipYield, ScheduleMove, SetScoreboard, SetStall, Slide
from nostall.sass.schedule.space import ScheduleSpace
from nostall.sass.schedule.state import Schedule


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a schedule and the original."""

    index: int
    """Original index of the instruction."""
    block: int
    """Number of its block."""
    text: str
    """The change in words."""
    undo: ScheduleMove
    """The move that takes the change back."""


def find_changes(space: ScheduleSpace, state: Schedule, blocks: Sequence[int] = ()) -> list[Change]:
    """Differences of ``state`` from the start state: positions, stalls, yields, scoreboards.

    Reuse flags and wait masks are not listed: they follow from the neighbours and from the
    scoreboards. ``blocks`` limits the search to these block numbers (empty: all blocks).
    """
    start = space.start()
    changes: list[Change] = []
    fields = ("stall", "yields", "write_sb", "read_sb")
    differs = np.any([getattr(start, f) != getattr(state, f) for f in fields], axis=0)
    for number in blocks or range(len(space.graph.blocks)):
        block = space.graph.blocks[number]
        changes += _order_changes(space, number, state.order[block.start : block.end].tolist())
        for index in np.flatnonzero(differs[block.start : block.end]) + block.start:
            changes += _control_changes(space, state, number, int(index))
    return changes


def undo_change(space: ScheduleSpace, state: Schedule, change: Change) -> Schedule | None:
    """``state`` without one change; None if the other changes make this illegal."""
    try:
        return space.apply(state, change.undo)
    except IllegalMove:
        return None


def _order_changes(space: ScheduleSpace, number: int, order: list[int]) -> list[Change]:
    """The fewest slides that turn the original order of a block into ``order``."""
    moved = set(out_of_order(order, order))
    stayed = [index for index in order if index not in moved]
    changes = []
    for position, index in enumerate(order):
        if index not in moved:
            continue
        before = bisect_left(stayed, index)
        target = order.index(stayed[before - 1]) + 1 if before else 0
        target -= target > position
        above = [i for i in order[position + 1 :] if i < index]
        below = [i for i in order[:position] if i > index]
        crossed, verb = (
            (above, "hoisted above") if len(above) > len(below) else (below, "sunk below")
        )
        text = f"{_name(space, index)} {verb} {_summary(space, crossed)} in block {number}"
        changes.append(Change(index, number, text, Slide(index, target - position, NO_TAGS)))
    return changes


def _control_changes(
    space: ScheduleSpace, state: Schedule, number: int, index: int
) -> list[Change]:
    """Changes of one instruction's stall count, yield flag and scoreboards."""
    original, control = space.start().control(index), state.control(index)
    name = _name(space, index)
    changes: list[Change] = []

    def add(text: str, undo: ScheduleMove) -> None:
        changes.append(Change(index, number, f"{name}: {text} in block {number}", undo))

    if original.stall != control.stall:
        undo = SetStall(index, original.stall, NO_TAGS)
        add(f"stall {control.stall} instead of {original.stall}", undo)
    if original.yields != control.yields:
        add("yields" if control.yields else "no longer yields", FlipYield(index, NO_TAGS))
    for write, kind in ((True, "write"), (False, "read")):
        old = original.write_sb if write else original.read_sb
        new = control.write_sb if write else control.read_sb
        if old != new:
            text = f"{kind} scoreboard {new} instead of {old}"
            add(text, SetScoreboard(index, write, old, NO_TAGS))
    return changes


def _name(space: ScheduleSpace, index: int) -> str:
    return f"{space.function.instructions[index].base} #{index}"


def _summary(space: ScheduleSpace, indices: Sequence[int]) -> str:
    """Number of instructions of the commonest opcode, and number of all others."""
    opcodes = Counter(space.function.instructions[index].base for index in indices)
    opcode, count = opcodes.most_common(1)[0]
    others = len(indices) - count
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"{count} {opcode}{more}"


def out_of_order(items: Sequence[int], places: Sequence[int]) -> list[int]:
    """The fewest items whose removal leaves ``places`` increasing.

    The other items form a longest increasing subsequence. If an item slides by ten positions, ten
    neighbours move by one position each, and only the item is returned.
    """
    tails: list[int] = []
    tail_positions: list[int] = []
    predecessor: list[int] = []
    for position, place in enumerate(places):
        length = bisect_left(tails, place)
        predecessor.append(tail_positions[length - 1] if length else -1)
        if length == len(tails):
            tails.append(place)
            tail_positions.append(position)
        else:
            tails[length], tail_positions[length] = place, position
    subsequence: set[int] = set()
    position = tail_positions[-1] if tail_positions else -1
    while position >= 0:
        subsequence.add(position)
        position = predecessor[position]
    return [item for position, item in enumerate(items) if position not in subsequence]
