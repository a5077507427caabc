"""The books of a strategy whose loop belongs to a library.

A learning library calls an environment, not the other way round, so such a strategy cannot be a
step function.  It asks the ledger for each value instead.  The ledger keeps the budget, the best,
the observers and the checkpoints, and ends the library's loop by raising :class:`Ended`.

Such a strategy is a function of its seed and of the values it was told.  So a checkpoint needs no
weights: it keeps the values, and a resumed search plays the same game again, is told the same
values without measuring anything, and goes on where they end.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Generic

from nostall.core import BadRun, Measurement, SearchResult
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.search.loop import (
    CHECKPOINT_SECONDS,
    Point,
    Task,
    checkpoint,
    conclude,
    settle,
    tell,
)

_VALUE = "value:"
_START = "start"


class Ended(Exception):
    """The budget is spent; not an error."""


class Ledger(Generic[S, M]):
    """Tells a strategy what states cost.

    ``start`` is the start state's value as the strategy first saw it; ``replayed`` counts the
    values that come from a checkpoint.
    """

    def __init__(self, task: Task[S, M], point: Point[S]) -> None:
        self.task, self.point = task, point
        memory = dict(point.memory)
        self.start = memory.pop(_START, task.start_measurement.value)
        known = sorted(name for name in memory if name.startswith(_VALUE))
        self._values = [memory[name] for name in known][: point.evaluations - 1]
        self.replayed = len(self._values)
        self._asked = 0
        self._due = monotonic() + CHECKPOINT_SECONDS

    def judge(self, move: M, state: S) -> Measurement:
        """What ``state``, reached by ``move``, costs; raises :class:`Ended` when the budget is
        spent.  Every visit is evaluated."""
        self._asked += 1
        if self._asked <= self.replayed:
            return self._again(self._values[self._asked - 1], state)
        if self.task.clock.spent(self.point.evaluations):
            raise Ended
        if monotonic() >= self._due:
            tell(self.task, checkpoint(self.task, self.point, self._memory))
            self._due = monotonic() + CHECKPOINT_SECONDS
        measurement = self.task.measure(state)
        self._take(settle(self.task, self.point, move, state, measurement, True, {}), measurement)
        return measurement

    @property
    def evaluations(self) -> int:
        """How many the strategy has had, the start state's and those from a checkpoint included."""
        return 1 + self._asked

    def conclude(self, stopped: Stop) -> SearchResult[S]:
        """The search's result."""
        return conclude(self.task, self.point, stopped, self._memory)

    def _take(self, point: Point[S], measurement: Measurement) -> None:
        # Values beyond the point's evaluations do not count: an interruption may come between.
        self._values.append(measurement.value)
        self.point = point

    def _again(self, value: float, state: S) -> Measurement:
        kind, unit = self.task.objective.kind, self.task.objective.unit
        if math.isinf(value):
            return Measurement(unit, (), kind, failure="it failed before the search was resumed")
        space = self.task.space
        if self._asked == self.replayed and space.key(state) != space.key(self.point.current):
            raise BadRun(
                f"the {self.replayed} values of the checkpoint belong to another game: the "
                "strategy's parameters or its libraries are not the same; start the run anew"
            )
        return Measurement(unit, (value,), kind)

    def _memory(self, point: Point[S]) -> dict[str, float]:
        kept = self._values[: point.evaluations - 1]
        return {_START: self.start} | {f"{_VALUE}{n:08}": value for n, value in enumerate(kept)}
