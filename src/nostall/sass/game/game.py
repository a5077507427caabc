"""The rules: what a turn does, what it earns, when an episode is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core import Measurement, Space
from nostall.sass.game.actions import Actions
from nostall.sass.schedule import Schedule
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
    """One kernel's game.  Every episode begins with the start state, whose ``cost`` is known.

    The reward of a move is CuAsmRL's: the change of throughput since the last turn in per cent of
    the original's, (t0 / t - t0 / t_last) * 100; throughput needs no FLOP count for that.  A failed
    state earns -1 and ends the episode.  An illegal action changes nothing and earns nothing.
    """

    def __init__(
        self, space: Space[Schedule, ScheduleMove], actions: Actions, judge: Judge, cost: float
    ) -> None:
        self.space, self.actions, self.judge, self.cost = space, actions, judge, cost
        self.reset()

    def reset(self) -> None:
        self.state = self.space.start()
        self.speed = 1.0
        self.mask: NDArray[np.bool_] = self.actions.mask(self.state)

    def play(self, action: int) -> Turn:
        """Take one turn."""
        if action >= self.actions.count:  # a filled-up action of a smaller kernel
            return Turn(0.0, False, None, None)
        move = self.actions.move(self.state, action)
        if move is None:
            return Turn(0.0, True, None, None)
        if not self.mask[action]:
            return Turn(0.0, False, None, None)
        state = self.space.apply(self.state, move)
        measurement = self.judge(move, state)
        self.state = state
        self.mask = self.actions.mask(state, move)
        if measurement.failure is not None:
            return Turn(FAILED, True, move, measurement)
        speed = self.cost / measurement.value
        reward = (speed - self.speed) * 100.0
        self.speed = speed
        return Turn(reward, not self.mask.any(), move, measurement)
