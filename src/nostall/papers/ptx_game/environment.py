"""The assembly game on PTX as a Gymnasium environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from nostall.core import BadInput, Measurement, Objective
from nostall.papers.ptx_game.actions import OFFSETS, Shifts
from nostall.papers.ptx_game.observation import FEATURES, UnitTable
from nostall.ptx.program.module import parse
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

HORIZON = 32
"""Steps of an episode, as in CuAsmRL."""
FAILURE_REWARD = -1.0
"""Reward of a state that cannot be measured, as in CuAsmRL."""

Observation = NDArray[np.float32]


class PtxGame(gymnasium.Env[Observation, np.int64]):
    """Gymnasium environment of the assembly game (CuAsmRL, arXiv:2501.08071) on PTX.

    An action shifts a memory access up or down in its block; the space offers legal shifts only, so
    that each state computes what the original does.  ``info["action_mask"]`` and
    :meth:`action_masks` give the legal actions; an illegal action changes nothing.  The reward is
    the change of throughput in per cent of the original's.

    Observations are float32 [1, units, features], in the present order; see
    :data:`~nostall.papers.ptx_game.observation.FEATURES`.  ``info`` contains ``cost`` (of the
    present state, in the objective's unit), ``ratio`` (original / present), ``kind`` and, after a
    failure, ``failure``.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own way)

    def __init__(
        self,
        ptx: str | Path,
        objective: Objective[PtxState],
        *,
        kernel: str | None = None,
        offsets: tuple[int, ...] = OFFSETS,
        horizon: int = HORIZON,
        render_mode: str | None = None,
    ) -> None:
        """Read the PTX and evaluate the original.

        ptx: the text of a module, or the path of a ``.ptx`` file
        objective: an objective over the kernel's states, such as
            ``nostall.tuning.assembler.objective.AssemblerObjective``
        kernel: name of the kernel; needed if there are several
        offsets: positions of one shift
        horizon: most steps of an episode
        render_mode: "ansi" or None

        Raises :class:`BadInput` if the original cannot be measured, or if nothing can move.
        """
        if horizon < 1 or not offsets or 0 in offsets:
            raise BadInput(
                f"the game got horizon={horizon} and offsets={offsets}; allowed are a horizon of "
                "at least 1 step, and offsets other than 0"
            )
        text = ptx.read_text() if isinstance(ptx, Path) else ptx
        self.space = PtxSpace(parse(text), kernel)
        self.objective, self.horizon, self.render_mode = objective, horizon, render_mode
        self.actions = Shifts(self.space, offsets)
        if not self.actions.candidates:
            raise BadInput(
                f"{self.space.kernel.name} has no memory access in a block of several "
                "instructions, so the game has no action; choose another kernel"
            )
        start = self._measure(self.space.start())
        if start.failure is not None:
            raise BadInput(
                f"the original cannot be measured: {start.failure}; a game needs a start that runs"
            )
        self.start_cost = start.value
        self._table = UnitTable(self.space)
        self.action_space = spaces.Discrete(self.actions.count)
        shape = (1, self._table.rows, len(FEATURES))
        self.observation_space = spaces.Box(0.0, 1.0, shape, np.float32)
        self._begin()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin()
        return self._observe(), self._info(None)

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take one action; returns (observation, reward, terminated, truncated, info).

        ``terminated``: the state failed, no action is legal, or the action ends the episode.
        """
        self.steps += 1
        reward, terminated, measurement = self._take(int(action))
        truncated = self.steps >= self.horizon and not terminated
        return self._observe(), reward, terminated, truncated, self._info(measurement)

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are legal, [actions]; sb3-contrib requires this name."""
        return self._mask

    def render(self) -> str | None:
        """The PTX of the present state, in mode ``ansi``."""
        return self.space.text(self.state) if self.render_mode == "ansi" else None

    def _begin(self) -> None:
        self.state, self.speedup, self.steps = self.space.start(), 1.0, 0
        self._mask = self.actions.mask(self.state)

    def _take(self, action: int) -> tuple[float, bool, Measurement | None]:
        """(reward, whether the episode ends, measurement of the new state) of an action."""
        move = self.actions.move(action)
        if move is None:
            return 0.0, True, None
        if not self._mask[action]:
            return 0.0, False, None
        self.state = self.space.apply(self.state, move)
        self._mask = self.actions.mask(self.state, move.block)
        measurement = self._measure(self.state)
        if measurement.failure is not None:
            return FAILURE_REWARD, True, measurement
        speedup = self.start_cost / measurement.value
        change, self.speedup = (speedup - self.speedup) * 100.0, speedup
        return change, not self._mask.any(), measurement

    def _measure(self, state: PtxState) -> Measurement:
        return self.objective.evaluate([state])[0]

    def _observe(self) -> Observation:
        return self._table.observe(self.state)[None]

    def _info(self, measurement: Measurement | None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "action_mask": self._mask.copy(),
            "cost": self.start_cost / self.speedup,
            "ratio": self.speedup,
            "kind": self.objective.kind,
        }
        if measurement is not None and measurement.failure is not None:
            info["failure"] = measurement.failure
        return info
