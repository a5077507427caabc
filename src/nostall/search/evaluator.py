"""Evaluator for strategies whose loop belongs to a library, such as reinforcement learning.

A learning library calls an environment, so such a strategy cannot be a step function of
:mod:`nostall.search.loop`. Instead it calls the evaluator for each value. The evaluator keeps the
budget, the best state, the observers and the checkpoints, and ends the library's loop with
:class:`BudgetSpent`.

The strategy is a function of its seed and of the values that it receives. So a checkpoint holds
the values and no weights: a resumed search repeats its episodes, receives the stored values without
any evaluation, and continues after the last one.
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
    notify,
    record_trial,
)

_VALUE = "value:"
"""Prefix of the values in a checkpoint's memory."""
_START = "start"
"""Key of the start value in a checkpoint's memory."""


class BudgetSpent(Exception):
    """Ends a library's loop because the budget is spent; not an error."""


class Evaluator(Generic[S, M]):
    """Evaluates states within the budget, and repeats the values of a checkpoint first."""

    def __init__(self, task: Task[S, M], point: Point[S]) -> None:
        self.task, self.point = task, point
        memory = dict(point.memory)
        self.start_value = memory.pop(_START, task.start_measurement.value)
        """Value of the start state when the strategy first ran."""
        keys = sorted(name for name in memory if name.startswith(_VALUE))
        self._values = [memory[name] for name in keys][: point.evaluations - 1]
        self.replayed = len(self._values)
        """Number of values that come from the checkpoint."""
        self._requested = 0
        self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS

    def evaluate(self, move: M, state: S) -> Measurement:
        """Evaluate ``state``, reached by ``move``, even if it was evaluated before.

        Raises :class:`BudgetSpent` if no budget is left.
        """
        self._requested += 1
        if self._requested <= self.replayed:
            return self._replay(self._values[self._requested - 1], state)
        if self.task.clock.spent(self.point.evaluations):
            raise BudgetSpent
        if monotonic() >= self._checkpoint_due:
            notify(self.task, checkpoint(self.task, self.point, self._memory))
            self._checkpoint_due = monotonic() + CHECKPOINT_SECONDS
        measurement = self.task.measure(state)
        point = record_trial(self.task, self.point, move, state, measurement, True, {})
        # A value without its point does not count, so an interruption between the two is harmless.
        self._values.append(measurement.value)
        self.point = point
        return measurement

    @property
    def evaluations(self) -> int:
        """Values that the strategy has received, with the start state's and the replayed ones."""
        return 1 + self._requested

    def conclude(self, stopped: Stop) -> SearchResult[S]:
        """The result of the search."""
        return conclude(self.task, self.point, stopped, self._memory)

    def _replay(self, value: float, state: S) -> Measurement:
        kind, unit = self.task.objective.kind, self.task.objective.unit
        if math.isinf(value):
            return Measurement(unit, (), kind, failure="it failed before the search was resumed")
        space = self.task.space
        is_last = self._requested == self.replayed
        if is_last and space.key(state) != space.key(self.point.current):
            raise BadRun(
                f"the {self.replayed} values of the checkpoint belong to another game: the "
                "strategy's parameters or its libraries are not the same; start a new run"
            )
        return Measurement(unit, (value,), kind)

    def _memory(self, point: Point[S]) -> dict[str, float]:
        values = self._values[: point.evaluations - 1]
        stored = {f"{_VALUE}{n:08}": value for n, value in enumerate(values)}
        return {_START: self.start_value} | stored
