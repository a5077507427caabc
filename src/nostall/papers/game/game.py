"""Rules of the assembly game: what an action does, its reward, and when an episode ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from nostall.core import BadInput, Measurement, Space
from nostall.papers.game.actions import ActionSet
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.arrays import BoolArray
from nostall.sass.schedule.moves import ScheduleMove

Evaluate = Callable[[ScheduleMove, Schedule], Measurement]
"""Returns the cost of the state that a move led to."""

FAILURE_REWARD = -1.0
"""Reward of a state that cannot be measured, as in CuAsmRL."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one action."""

    reward: float
    terminated: bool
    """Whether the episode ends: the state failed, no action is legal, or the action ends it. The
    horizon of an episode is up to the environment."""
    move: ScheduleMove | None
    measurement: Measurement | None


class Game:
    """The assembly game of one kernel.

    The reward of a move is that of CuAsmRL: the change of throughput in per cent of the
    original's, (t0 / t - t0 / t_last) * 100. A failed state has a reward of -1 and ends the
    episode. An illegal action changes nothing and has no reward.
    """

    def __init__(
        self,
        space: Space[Schedule, ScheduleMove],
        actions: ActionSet,
        evaluate: Evaluate,
        start_cost: float,
    ) -> None:
        self.space, self.actions, self.evaluate = space, actions, evaluate
        self.start_cost = start_cost
        self.reset()

    def reset(self, state: Schedule | None = None, speedup: float = 1.0) -> None:
        """Begin an episode at the start state, or at a state of known ``speedup`` (t0 / t)."""
        self.state = self.space.start() if state is None else state
        self.speedup = speedup
        self.mask: BoolArray = self.actions.mask(self.state)

    def step(
        self, action: int, accept: Callable[[float], bool] = lambda change: True
    ) -> StepResult:
        """Take one action.

        ``accept`` receives the change of throughput in per cent of the original's. If it returns
        False, the state does not change and there is no reward.
        """
        if action >= self.actions.count:  # padding of a smaller kernel in a vector environment
            return StepResult(0.0, False, None, None)
        move = self.actions.move(self.state, action)
        if move is None:
            return StepResult(0.0, True, None, None)
        if not self.mask[action]:
            return StepResult(0.0, False, None, None)
        state = self.space.apply(self.state, move)
        measurement = self.evaluate(move, state)
        failed = measurement.failure is not None
        speedup = self.speedup if failed else self.start_cost / measurement.value
        change = (speedup - self.speedup) * 100.0
        if not failed and not accept(change):
            return StepResult(0.0, False, move, measurement)
        self.state, self.speedup = state, speedup
        self.mask = self.actions.mask(state, move)
        if failed:
            return StepResult(FAILURE_REWARD, True, move, measurement)
        return StepResult(change, not self.mask.any(), move, measurement)


def require_schedule_space(space: Space[Any, Any]) -> ScheduleSpace:
    """``space`` as a space of schedules; raises :class:`BadInput` if it is another space."""
    # Wrappers of a ScheduleSpace have its attributes, so this is no isinstance check.
    if not (hasattr(space, "graph") and hasattr(space, "function")):
        raise BadInput(
            f"the assembly game is played on SASS schedules, not on {type(space).__name__}; pass a "
            "ScheduleSpace, or choose another strategy"
        )
    return cast(ScheduleSpace, space)
