"""The assembly game on PTX as a Gymnasium environment.

Actions of the game on PTX: shifts of memory accesses, numbered, with a mask of legal ones.

Observation of the game on PTX: a row of features for each unit, in the present order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from nostall.core import BadInput, Measurement, Objective
from nostall.ptx.program.module import parse
from nostall.ptx.program.resources import MEMORY, Reference, Resource
from nostall.ptx.schedule.moves import Shift
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

OFFSETS = (-1, 1, -4, 4, -16, 16)
"""Positions of one shift.  ptxas re-orders its input, so that a shift by one often changes nothing;
the assembly game of CuAsmRL has -1 and 1."""
_ACCESSES = MEMORY | {Resource.STABLE, Resource.FENCE}
_TAGS = frozenset(("order",))


class Shifts:
    """Each memory access of a kernel, moved up or down by one of the offsets.

    Action ``n`` moves candidate ``n // len(offsets)`` by ``offsets[n % len(offsets)]``; the last
    action ends the episode and is never legal.  An action means the same in each state.
    """

    def __init__(self, space: PtxSpace, offsets: tuple[int, ...] = OFFSETS) -> None:
        self.space, self.offsets = space, offsets
        self.candidates = [
            (number, index)
            for number, block in enumerate(space.blocks)
            for index, unit in enumerate(block.units)
            if len(block) > 1 and _ACCESSES & (unit.reads | unit.writes)
        ]
        self.count = len(self.candidates) * len(offsets) + 1
        self._mask = np.zeros(self.count, dtype=np.bool_)

    def move(self, action: int) -> Shift | None:
        """The move of an action; None if the action ends the episode."""
        if action == self.count - 1:
            return None
        candidate, offset = divmod(action, len(self.offsets))
        return Shift(*self.candidates[candidate], self.offsets[offset], _TAGS)

    def mask(self, state: PtxState, changed: int | None = None) -> NDArray[np.bool_]:
        """Which actions are legal in ``state``, [count].

        ``changed``: the only block whose order differs from that of the previous call.
        """
        width = len(self.offsets)
        for number, (block, unit) in enumerate(self.candidates):
            if changed is None or block == changed:
                for at, offset in enumerate(self.offsets):
                    legal = self.space.is_legal(state, Shift(block, unit, offset, _TAGS))
                    self._mask[width * number + at] = legal
        return self._mask.copy()


_SPACES = (Resource.GLOBAL, Resource.SHARED, Resource.FENCE, Resource.CONVERGENCE, Resource.WGMMA)
_MATRIX = ("mma", "wgmma", "tcgen05")
FEATURES = (
    "block",
    "loops",
    "position",
    "predecessor",
    "successor",
    "matrix product",
    *(f"{how} {space.name.lower()}" for space in _SPACES for how in ("reads", "writes")),
)
"""Columns.  All are in [0, 1]: the block by its number, the loops around it up to 3, the position
in the block, and the distances to the nearest predecessor and successor, up to 32 positions."""
_MAX_LOOPS, _MAX_DISTANCE = 3, 32


class UnitTable:
    """Observes states of one space."""

    def __init__(self, space: PtxSpace) -> None:
        self.space = space
        self.rows = sum(map(len, space.blocks))
        self._fixed = [
            np.array([_fixed(unit.reads, unit.writes, unit.words) for unit in block.units])
            for block in space.blocks
        ]

    def observe(self, state: PtxState) -> NDArray[np.float32]:
        """The table of a state, float32 [units, features]."""
        tables = [self._block(state, number) for number in range(len(self.space.blocks))]
        return np.concatenate(tables).astype(np.float32)

    def _block(self, state: PtxState, number: int) -> NDArray[np.float64]:
        order = self.space.order(state, number)
        graph = self.space.graphs[number]
        position = {unit: at for at, unit in enumerate(order)}
        place = np.arange(len(order)) / max(1, len(order) - 1)
        before = [max((position[p] for p in graph.predecessors[u]), default=None) for u in order]
        after = [min((position[s] for s in graph.successors[u]), default=None) for u in order]
        distances = [
            (_distance(at, before[at]), _distance(at, after[at])) for at in range(len(order))
        ]
        block = np.full(len(order), number / max(1, len(self.space.blocks) - 1))
        loops = np.full(len(order), min(graph.block.depth, _MAX_LOOPS) / _MAX_LOOPS)
        fixed = self._fixed[number][list(order)]
        return np.column_stack((block, loops, place, np.array(distances), fixed))


def _distance(at: int, other: int | None) -> float:
    """Positions between two units, 1 if there is no other one."""
    return 1.0 if other is None else min(abs(at - other), _MAX_DISTANCE) / _MAX_DISTANCE


def _fixed(
    reads: frozenset[Reference], writes: frozenset[Reference], words: frozenset[str]
) -> list[float]:
    """The features of a unit that do not depend on its place."""
    return [
        float(any(word.partition(".")[0] in _MATRIX for word in words)),
        *(float(space in side) for space in _SPACES for side in (reads, writes)),
    ]


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
    :data:`~nostall.papers.ptx_game.environment.FEATURES`.  ``info`` contains ``cost`` (of the
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
