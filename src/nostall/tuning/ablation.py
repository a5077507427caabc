"""Which changes carry a gain: each is taken back alone, and what is left is evaluated."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from nostall.core import Objective
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.changes import Change, find_changes, undo_change
from nostall.sass.schedule.moves import Slide

MOST = 32
"""Changes that are measured: those of memory accesses first, then the longest slides."""

_PASSES = 3
_REPEATS = 5
"""Looks at a measured state, of which the median counts."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A change and its part in the gain.

    ``lost``: how much slower the schedule is without it, in per cent of the original's time; None
    where it cannot be taken back alone, or the rest cannot be evaluated.  Parts need not add up to
    the gain: changes work together.
    """

    text: str
    block: int
    index: int
    lost: float | None


@dataclass(frozen=True, slots=True)
class Ablation:
    """``rows``: the changes that carry the gain, the greatest part first; ``total``: changes in
    all; ``idle``: changes that were taken back together without any loss."""

    rows: tuple[Carried, ...]
    total: int
    idle: int
    kind: str

    def to_json(self) -> dict[str, object]:
        """The contents of ``ablation.json``."""
        return {"schema_version": 1, **asdict(self)}


def ablate(
    space: ScheduleSpace, objective: Objective[Schedule], best: Schedule, start: float
) -> Ablation:
    """What carries the gain of ``best``; ``start`` is the original's value.

    A search leaves many changes that do nothing.  On a model, whose values are exact, those are
    taken back first; the others are judged by taking back each alone.
    """
    total = len(find_changes(space, best))
    state = best
    if objective.kind == "modelled":
        for _ in range(_PASSES):
            before, state = state, _stripped(space, objective, state)
            if before == state:
                break
    left = find_changes(space, state)
    idle = total - len(left)
    if objective.kind == "measured":
        left = sorted(left, key=lambda change: _promise(space, change))[:MOST]
    value = _value(objective, state)
    rows = [_carried(space, objective, state, change, value, start) for change in left]
    return Ablation(tuple(sorted(rows, key=_rank)), total, idle, objective.kind)


def _stripped(space: ScheduleSpace, objective: Objective[Schedule], state: Schedule) -> Schedule:
    """``state`` without the changes that cost nothing to take back, tried in original order."""
    value = objective.evaluate([state])[0].value
    for number in range(len(space.graph.blocks)):
        tried: set[tuple[int, str]] = set()
        left = find_changes(space, state, [number])
        while left:
            change = left.pop(0)
            key = (change.index, type(change.undo).__name__)
            rest = None if key in tried else undo_change(space, state, change)
            tried.add(key)
            if rest is not None and objective.evaluate([rest])[0].value <= value:
                state, left = rest, find_changes(space, rest, [number])
    return state


def _promise(space: ScheduleSpace, change: Change) -> tuple[bool, int]:
    far = abs(change.undo.offset) if isinstance(change.undo, Slide) else 0
    return not space.graph.memory[change.index], -far


def _carried(
    space: ScheduleSpace,
    objective: Objective[Schedule],
    best: Schedule,
    change: Change,
    value: float | None,
    start: float,
) -> Carried:
    rest = undo_change(space, best, change)
    lost = None
    if rest is not None and value is not None:
        other = _value(objective, rest)
        lost = None if other is None else 100.0 * (other - value) / start
    return Carried(change.text, change.block, change.index, lost)


def _value(objective: Objective[Schedule], state: Schedule) -> float | None:
    looks = 1 if objective.kind == "modelled" else _REPEATS
    seen = objective.evaluate([state] * looks)
    if any(measurement.failure is not None for measurement in seen):
        return None
    return statistics.median(measurement.value for measurement in seen)


def _rank(row: Carried) -> tuple[bool, float]:
    return row.lost is None, -(row.lost or 0.0)
