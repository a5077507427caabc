"""The rules: what a turn does, what it earns, when an episode is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nostall.core import BadInput, Measurement, Space
from nostall.sass.game.actions import Actions
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

Judge = Callable[[ScheduleMove, Schedule], Measurement]
"""Says what the state costs that a move led to."""

FAILED = -1.0
"""Reward of a state that cannot be measured (CuAsmRL's)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn led to.  ``over``: the game itself ended (a failed state, no legal move left, or
    the player gave up); running out of turns is the environment's affair."""

    reward: float
    over: bool
    move: ScheduleMove | None
    measurement: Measurement | None


class Game:
    """One kernel's game; ``cost`` is the start state's.

    The reward of a move is CuAsmRL's: the change of throughput since the last turn in per cent of
    the original's, (t0 / t - t0 / t_last) * 100; throughput needs no FLOP count for that.  A failed
    state earns -1 and ends the episode.  An illegal action changes nothing and earns nothing.
    """

    def __init__(
        self, space: Space[Schedule, ScheduleMove], actions: Actions, judge: Judge, cost: float
    ) -> None:
        self.space, self.actions, self.judge, self.cost = space, actions, judge, cost
        self.reset()

    def reset(self, state: Schedule | None = None, speed: float = 1.0) -> None:
        """A new episode, from the start state or from another of known ``speed`` (t0 / t)."""
        self.state = self.space.start() if state is None else state
        self.speed = speed
        self.mask: NDArray[np.bool_] = self.actions.mask(self.state)

    def play(self, action: int, keep: Callable[[float], bool] = lambda change: True) -> Turn:
        """Take one turn.

        ``keep`` is asked with the change of speed (in per cent of the original's) whether the game
        goes on from the new state; where not, the turn earns nothing and changes nothing.
        """
        if action >= self.actions.count:  # a filled-up action of a smaller kernel
            return Turn(0.0, False, None, None)
        move = self.actions.move(self.state, action)
        if move is None:
            return Turn(0.0, True, None, None)
        if not self.mask[action]:
            return Turn(0.0, False, None, None)
        state = self.space.apply(self.state, move)
        measurement = self.judge(move, state)
        failed = measurement.failure is not None
        speed = self.speed if failed else self.cost / measurement.value
        change = (speed - self.speed) * 100.0
        if not failed and not keep(change):
            return Turn(0.0, False, move, measurement)
        self.state, self.speed = state, speed
        self.mask = self.actions.mask(state, move)
        if failed:
            return Turn(FAILED, True, move, measurement)
        return Turn(change, not self.mask.any(), move, measurement)


def playable(space: Space[Any, Any]) -> ScheduleSpace:
    """``space`` as what the game is played on; raises :class:`BadInput` when it is not."""
    if not (hasattr(space, "graph") and hasattr(space, "function")):
        raise BadInput(
            f"the assembly game is played on SASS schedules, not on {type(space).__name__}; give a "
            "ScheduleSpace, or choose another strategy"
        )
    return cast(ScheduleSpace, space)
