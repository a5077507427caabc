"""Ablation of a search result: how much time each change of the schedule saves."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from nostall.core import Objective
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.changes import Change, find_changes, undo_change
from nostall.sass.schedule.moves import Slide

MAX_MEASURED_CHANGES = 32
"""Changes that are measured: those of memory accesses first, then the longest slides."""

_MAX_PASSES = 3
"""Passes over the schedule that look for changes without effect."""
_REPEATS = 5
"""Measurements of one schedule on a GPU; the median counts."""


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """Effect of one change on the time of the schedule."""

    text: str
    """The change in words."""
    block: int
    """Number of the block that contains the instruction."""
    index: int
    """Original index of the instruction."""
    loss_percent: float | None
    """Slowdown without this change, in per cent of the original's time.  None if the change cannot
    be undone alone, or if the schedule without it cannot be evaluated.  The values of several
    changes need not add up to the gain, because changes depend on each other."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """Time gained by each change of a schedule: the loss if that change alone is undone."""

    effects: tuple[ChangeEffect, ...]
    """The changes that were undone one by one, largest loss first."""
    num_changes: int
    """Changes of the schedule in all."""
    num_without_effect: int
    """Changes that were undone together without any loss."""
    kind: str
    """Kind of the objective: ``modelled`` or ``measured``."""

    def to_json(self) -> dict[str, object]:
        """The contents of ``ablation.json``."""
        return {
            "schema_version": 1,
            "rows": [
                {"text": e.text, "block": e.block, "index": e.index, "lost": e.loss_percent}
                for e in self.effects
            ],
            "total": self.num_changes,
            "idle": self.num_without_effect,
            "kind": self.kind,
        }


def ablate(
    space: ScheduleSpace, objective: Objective[Schedule], best: Schedule, start_value: float
) -> Ablation:
    """Find the changes that contribute to the gain of ``best``; each is undone alone.

    ``start_value`` is the original's time.  A search leaves many changes without effect.  With a
    modelled objective, whose values are exact, these are undone together first.  With a measured
    objective, at most :data:`MAX_MEASURED_CHANGES` changes are measured.
    """
    num_changes = len(find_changes(space, best))
    state = best
    if objective.kind == "modelled":
        for _ in range(_MAX_PASSES):
            before, state = state, _without_idle_changes(space, objective, state)
            if before == state:
                break
    changes = find_changes(space, state)
    num_without_effect = num_changes - len(changes)
    if objective.kind == "measured":
        changes = sorted(changes, key=lambda change: _measuring_order(space, change))
        changes = changes[:MAX_MEASURED_CHANGES]
    value = _value(objective, state)
    effects = []
    for change in changes:
        loss = _loss_percent(space, objective, state, change, value, start_value)
        effects.append(ChangeEffect(change.text, change.block, change.index, loss))
    ranked = tuple(sorted(effects, key=_sort_key))
    return Ablation(ranked, num_changes, num_without_effect, objective.kind)


def _without_idle_changes(
    space: ScheduleSpace, objective: Objective[Schedule], state: Schedule
) -> Schedule:
    """``state`` without the changes that can be undone at no cost, tried in original order."""
    value = objective.evaluate([state])[0].value
    for number in range(len(space.graph.blocks)):
        tried: set[tuple[int, str]] = set()
        changes = find_changes(space, state, [number])
        while changes:
            change = changes.pop(0)
            key = (change.index, type(change.undo).__name__)
            undone = None if key in tried else undo_change(space, state, change)
            tried.add(key)
            if undone is not None and objective.evaluate([undone])[0].value <= value:
                state, changes = undone, find_changes(space, undone, [number])
    return state


def _measuring_order(space: ScheduleSpace, change: Change) -> tuple[bool, int]:
    """Sort key: memory accesses first, then long slides."""
    distance = abs(change.undo.offset) if isinstance(change.undo, Slide) else 0
    return not space.graph.memory[change.index], -distance


def _loss_percent(
    space: ScheduleSpace,
    objective: Objective[Schedule],
    state: Schedule,
    change: Change,
    value: float | None,
    start_value: float,
) -> float | None:
    """See :attr:`ChangeEffect.loss_percent`; ``value`` is the value of ``state``."""
    undone = undo_change(space, state, change)
    if undone is None or value is None:
        return None
    undone_value = _value(objective, undone)
    return None if undone_value is None else 100.0 * (undone_value - value) / start_value


def _value(objective: Objective[Schedule], state: Schedule) -> float | None:
    """The value of a schedule, or None if it cannot be evaluated."""
    repeats = 1 if objective.kind == "modelled" else _REPEATS
    measurements = objective.evaluate([state] * repeats)
    if any(measurement.failure is not None for measurement in measurements):
        return None
    return statistics.median(measurement.value for measurement in measurements)


def _sort_key(effect: ChangeEffect) -> tuple[bool, float]:
    return effect.loss_percent is None, -(effect.loss_percent or 0.0)
