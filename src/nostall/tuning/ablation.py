"""Which changes carry a gain: each is taken back alone, and what is left is evaluated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.core import Objective
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.changes import Change, changes, without

MOST = 64
"""Changes that are looked at, in original order."""

_REPEATS = 7
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


def ablate(
    space: ScheduleSpace, objective: Objective[Schedule], best: Schedule, start: float
) -> tuple[list[Carried], int]:
    """Each change's part, the greatest first, and how many changes there are in all.

    ``start`` is the original's value in the objective's unit.
    """
    found = changes(space, best)
    value = _value(objective, best)
    rows = [_carried(space, objective, best, change, value, start) for change in found[:MOST]]
    return sorted(rows, key=_rank), len(found)


def told(rows: Sequence[Carried], total: int, kind: str) -> dict[str, object]:
    """The ablation as it goes into ``ablation.json``."""
    kept = [{"text": r.text, "block": r.block, "index": r.index, "lost": r.lost} for r in rows]
    return {"schema_version": 1, "kind": kind, "changes": total, "rows": kept}


def _carried(
    space: ScheduleSpace,
    objective: Objective[Schedule],
    best: Schedule,
    change: Change,
    value: float | None,
    start: float,
) -> Carried:
    rest = without(space, best, change)
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
