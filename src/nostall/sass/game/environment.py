"""The game as a Gymnasium environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from nostall.core import BadInput, LaunchSpec, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.sass.game.actions import MemorySlides
from nostall.sass.game.game import Game
from nostall.sass.game.graph_view import EDGE_FEATURES, NODE_FEATURES, GraphView
from nostall.sass.game.matrix import HIGH, LOW, Matrix
from nostall.sass.model import SmModel
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.graph import Graph
from nostall.sass.schedule.moves import ScheduleMove

HORIZON = 32
"""CuAsmRL's turns per episode."""

Observation = NDArray[np.float32] | dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of observations and actions; those of a smaller kernel are filled up to them."""

    instructions: int
    columns: int
    edges: int
    actions: int

    def __or__(self, other: Sizes) -> Sizes:
        """Sizes that both fit in."""
        return Sizes(
            max(self.instructions, other.instructions),
            max(self.columns, other.columns),
            max(self.edges, other.edges),
            max(self.actions, other.actions),
        )


class Match(gymnasium.Env[Observation, np.int64]):
    """A game as an environment; see :class:`AssemblyGame`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own way)

    def __init__(
        self,
        game: Game,
        kind: Kind,
        function: Function,
        graph: Graph,
        *,
        observation: str = "matrix",
        horizon: int = HORIZON,
        sizes: Sizes | None = None,
        render_mode: str | None = None,
    ) -> None:
        if observation not in ("matrix", "graph") or horizon < 1:
            raise BadInput(
                f"the game got observation={observation!r} and horizon={horizon}; allowed are "
                "'matrix' or 'graph', and at least 1 turn"
            )
        self.game, self.kind, self.function = game, kind, function
        self.horizon, self.render_mode, self.turn = horizon, render_mode, 0
        self._matrix = Matrix(function) if observation == "matrix" else None
        self._graph = GraphView(function, graph) if observation == "graph" else None
        own = self._own_sizes(game.actions.count)
        self.sizes = own | sizes if sizes is not None else own
        self.action_space = spaces.Discrete(self.sizes.actions)
        self.observation_space = self._space()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset()
        self.turn = 0
        return self._observe(), self._info(None)

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One turn.  ``terminated``: the game is over (see :class:`Turn`); ``truncated``: only the
        horizon is reached, and more could have been earned."""
        turn = self.game.play(int(action))
        self.turn += 1
        cut = self.turn >= self.horizon and not turn.over
        return self._observe(), turn.reward, turn.over, cut, self._info(turn.measurement)

    def action_masks(self) -> NDArray[np.bool_]:
        """[actions]: legal now.  The name is what sb3-contrib asks for."""
        mask = np.zeros(self.sizes.actions, dtype=np.bool_)
        mask[: len(self.game.mask)] = self.game.mask
        return mask

    def render(self) -> str | None:
        """The present order as text, one instruction a line, in mode ``ansi``."""
        if self.render_mode != "ansi":
            return None
        by_index = {i.index: i for i in self.function.instructions}
        order = self.game.state.order.tolist()
        return "\n".join(f"{i:4} {self.game.state.control(i)} {by_index[i].text}" for i in order)

    def _own_sizes(self, actions: int) -> Sizes:
        if self._matrix is not None:
            return Sizes(self._matrix.shape[1], self._matrix.shape[2], 0, actions)
        assert self._graph is not None
        return Sizes(self._graph.nodes, len(NODE_FEATURES), len(self._graph.edges), actions)

    def _space(self) -> spaces.Space[Any]:
        n, edges = self.sizes.instructions, self.sizes.edges
        if self._matrix is not None:
            return spaces.Box(LOW, HIGH, (1, n, self.sizes.columns), np.float32)
        values = (edges, len(EDGE_FEATURES))
        return spaces.Dict(
            {
                "nodes": spaces.Box(0.0, 1.0, (n, len(NODE_FEATURES)), np.float32),
                "edges": spaces.Box(-1, max(0, n - 1), (edges, 2), np.int32),
                "edge_values": spaces.Box(-HIGH, HIGH, values, np.float32),
            }
        )

    def _observe(self) -> Observation:
        state = self.game.state
        if self._matrix is not None:
            table = self._matrix.of(state)
            return _filled(table, (1, self.sizes.instructions, self.sizes.columns), -1)
        assert self._graph is not None
        nodes, values = self._graph.of(state)
        return {
            "nodes": _filled(nodes, (self.sizes.instructions, nodes.shape[1]), 0),
            "edges": _filled(self._graph.edges.copy(), (self.sizes.edges, 2), -1),
            "edge_values": _filled(values, (self.sizes.edges, values.shape[1]), 0),
        }

    def _info(self, measurement: Measurement | None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "action_mask": self.action_masks(),
            "cost": self.game.cost / self.game.speed,
            "ratio": self.game.speed,
            "kind": self.kind,
        }
        if measurement is not None and measurement.failure is not None:
            info["failure"] = measurement.failure
        return info


class AssemblyGame(Match):
    """Move memory instructions of a kernel up and down; earn the change in its speed.

    ``program`` is a cubin (path or bytes) or a :class:`Program`, ``kernel`` names the kernel where
    there are several.  ``objective`` is an :class:`Objective` over its schedules or ``"model"``,
    which needs the ``launch``.  An episode has at most ``horizon`` turns.

    Actions: one line up or down for each global and shared access, and one that ends the episode
    and is never legal.  ``info["action_mask"]`` and :meth:`action_masks` say what is legal; an
    illegal action changes nothing.  Observations: ``"matrix"`` is CuAsmRL's (float32 [1,
    instructions, columns]), ``"graph"`` a dictionary of ``nodes`` [n, features], ``edges`` [E, 2]
    and ``edge_values`` [E, 3].  ``sizes`` are minimal shapes, for several kernels in one vector;
    rows that stand for nothing are -1 (matrix, edges) or 0.

    ``info`` tells ``cost`` (of the present schedule, in the objective's unit), ``ratio`` (original
    / present), ``kind`` (measured or modelled) and ``failure`` where there is one.  With a modelled
    objective everything is deterministic; the seed changes nothing.
    """

    def __init__(
        self,
        program: Program | Path | str | bytes,
        objective: Objective[Schedule] | str = "model",
        *,
        kernel: str | None = None,
        launch: LaunchSpec | None = None,
        observation: str = "matrix",
        horizon: int = HORIZON,
        sizes: Sizes | None = None,
        render_mode: str | None = None,
    ) -> None:
        read = _read(program)
        space = ScheduleSpace(read, read.kernel(kernel))
        self.objective = _objective(objective, space, launch)
        start = self.objective.evaluate([space.start()])[0]
        if start.failure is not None:
            raise BadInput(
                f"the start state cannot be measured: {start.failure}; a game needs a start that "
                "runs; make the unchanged program run first (`nostall bench` tries it alone)"
            )
        super().__init__(
            Game(space, MemorySlides(space.function, space.graph), self._judge, start.value),
            self.objective.kind,
            space.function,
            space.graph,
            observation=observation,
            horizon=horizon,
            sizes=sizes,
            render_mode=render_mode,
        )

    def _judge(self, move: ScheduleMove, state: Schedule) -> Measurement:
        return self.objective.evaluate([state])[0]


def _filled(array: NDArray[Any], shape: tuple[int, ...], value: int) -> NDArray[Any]:
    if array.shape == shape:
        return array
    whole = np.full(shape, value, dtype=array.dtype)
    whole[tuple(slice(0, size) for size in array.shape)] = array
    return whole


def _read(program: Program | Path | str | bytes) -> Program:
    if isinstance(program, Program):
        return program
    if isinstance(program, bytes):
        return Program.from_cubin(program)
    try:
        return Program.from_cubin(Path(program).read_bytes())
    except OSError as error:
        raise BadInput(
            f"{program} cannot be read ({error.strerror}); give a .cubin, its bytes or a Program"
        ) from error


def _objective(
    objective: Objective[Schedule] | str, space: ScheduleSpace, launch: LaunchSpec | None
) -> Objective[Schedule]:
    if isinstance(objective, Objective):
        return objective
    if objective != "model":
        raise BadInput(
            f"the game got objective={objective!r}; allowed are 'model' or an Objective over the "
            "kernel's schedules; a measured one is nostall.tuning.gpu_objective.MeasuredSchedules"
        )
    if launch is None:
        raise BadInput("the SM model needs to know how the kernel is launched; give launch=...")
    return SmModel(space.program, space.function, launch)
