"""The assembly game as a Gymnasium environment.

CuAsmRL's observation: a matrix with one row per instruction, in the current order.

Columns: the six wait slots (their number, or -1), read and write scoreboard (-1: none), yield,
stall, guarded or not, number of the memory opcode (-1: all others), and the operands, destination
first. An operand is a number in [0, 1] by its first appearance; rows are padded with -1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numba import njit
from numpy.typing import NDArray

from nostall.core import BadInput, LaunchSpec, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.papers.game.actions import CUASMRL_OPCODES, MemorySlides
from nostall.papers.game.game import Game
from nostall.papers.game.graph_view import EDGE_FEATURES, NODE_FEATURES, GraphView
from nostall.sass.model import SmModel
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.arrays import BoolArray, Int32Array, UInt8Array
from nostall.sass.schedule.graph import DependenceGraph
from nostall.sass.schedule.moves import ScheduleMove

Float32Array = NDArray[np.float32]

_CONTROL_COLUMNS = 10
LOW, HIGH = -1.0, 16.0
"""Bounds of all entries."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def _fill_rows(
    rows: Float32Array,
    static: Float32Array,
    order: Int32Array,
    stall: UInt8Array,
    yields: UInt8Array,
    write_sb: UInt8Array,
    read_sb: UInt8Array,
    wait: UInt8Array,
    reuse: UInt8Array,
) -> None:
    """Fill one row per position: control fields, then the columns that no move changes."""
    for p in range(len(order)):
        i = order[p]
        for slot in range(6):
            rows[p, slot] = slot if wait[i] >> slot & 1 else -1
        rows[p, 6] = read_sb[i] if read_sb[i] < 6 else -1
        rows[p, 7] = write_sb[i] if write_sb[i] < 6 else -1
        rows[p, 8] = yields[i]
        rows[p, 9] = stall[i]
        for column in range(static.shape[1]):
            rows[p, _CONTROL_COLUMNS + column] = static[i, column]


class MatrixView:
    """Observes the schedules of one kernel as matrices."""

    def __init__(self, function: Function) -> None:
        instructions = sorted(function.instructions, key=lambda i: i.index)
        operands = [_operands(i) for i in instructions]
        numbers: dict[str, int] = {}
        for row in operands:
            for operand in row:
                numbers.setdefault(operand, len(numbers))
        sources = max([len(row) - 1 for row in operands], default=0)
        self.shape = (1, len(instructions), _CONTROL_COLUMNS + 3 + max(0, sources))
        """(1, instructions, columns): an image with one channel."""
        static_shape = (self.shape[1], self.shape[2] - _CONTROL_COLUMNS)
        self._static = np.full(static_shape, -1.0, dtype=np.float32)
        for instruction, row in zip(instructions, operands, strict=True):
            values = [float(instruction.is_guarded), _opcode_number(instruction)]
            values += [numbers[operand] / len(numbers) for operand in row]
            self._static[instruction.index, : len(values)] = values

    def observe(self, state: Schedule) -> Float32Array:
        """The matrix of ``state``, float32 of ``shape``."""
        matrix = np.empty(self.shape, dtype=np.float32)
        _fill_rows(matrix[0], self._static, *state.arrays())
        return matrix


def _operands(instruction: Instruction) -> tuple[str, ...]:
    return tuple(operand.replace(".reuse", "") for operand in instruction.operands)


def _opcode_number(instruction: Instruction) -> float:
    base = instruction.base
    if base in CUASMRL_OPCODES and not instruction.is_barrier:
        return float(CUASMRL_OPCODES.index(base))
    return -1.0


HORIZON = 32
"""CuAsmRL's steps per episode."""

Observation = NDArray[np.float32] | dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of observations and of the action space; smaller kernels are padded to them."""

    instructions: int
    columns: int
    """Columns of the matrix, or features of a node."""
    edges: int
    actions: int

    def __or__(self, other: Sizes) -> Sizes:
        """The smallest sizes that fit both."""
        return Sizes(
            max(self.instructions, other.instructions),
            max(self.columns, other.columns),
            max(self.edges, other.edges),
            max(self.actions, other.actions),
        )


class GameEnvironment(gymnasium.Env[Observation, np.int64]):
    """Gymnasium environment of any :class:`Game`; see :class:`AssemblyGame`."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (Gymnasium's own way)

    def __init__(
        self,
        game: Game,
        kind: Kind,
        function: Function,
        graph: DependenceGraph,
        *,
        observation: str = "matrix",
        horizon: int = HORIZON,
        sizes: Sizes | None = None,
        render_mode: str | None = None,
    ) -> None:
        if observation not in ("matrix", "graph") or horizon < 1:
            raise BadInput(
                f"the game got observation={observation!r} and horizon={horizon}; allowed are "
                "'matrix' or 'graph', and a horizon of at least 1 step"
            )
        self.game, self.kind, self.function = game, kind, function
        self.horizon, self.render_mode, self.steps = horizon, render_mode, 0
        self._matrix = MatrixView(function) if observation == "matrix" else None
        self._graph = GraphView(function, graph) if observation == "graph" else None
        own_sizes = self._own_sizes(game.actions.count)
        self.sizes = own_sizes | sizes if sizes is not None else own_sizes
        self.action_space = spaces.Discrete(self.sizes.actions)
        self.observation_space = self._observation_space()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset()
        self.steps = 0
        return self._observe(), self._info(None)

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take one action; returns (observation, reward, terminated, truncated, info).

        ``terminated``: the game itself ends the episode, see ``StepResult``. ``truncated``: the
        episode only reaches the horizon, and further steps could have earned more.
        """
        result = self.game.step(int(action))
        self.steps += 1
        truncated = self.steps >= self.horizon and not result.terminated
        info = self._info(result.measurement)
        return self._observe(), result.reward, result.terminated, truncated, info

    def action_masks(self) -> BoolArray:
        """Which actions are legal, [actions]; sb3-contrib requires this name."""
        mask = np.zeros(self.sizes.actions, dtype=np.bool_)
        mask[: len(self.game.mask)] = self.game.mask
        return mask

    def render(self) -> str | None:
        """The current schedule as text, one instruction a line, in mode ``ansi``."""
        if self.render_mode != "ansi":
            return None
        by_index = {i.index: i for i in self.function.instructions}
        order = self.game.state.order.tolist()
        return "\n".join(f"{i:4} {self.game.state.control(i)} {by_index[i].text}" for i in order)

    def _own_sizes(self, actions: int) -> Sizes:
        """The sizes of this kernel."""
        if self._matrix is not None:
            return Sizes(self._matrix.shape[1], self._matrix.shape[2], 0, actions)
        assert self._graph is not None
        return Sizes(self._graph.nodes, len(NODE_FEATURES), len(self._graph.edges), actions)

    def _observation_space(self) -> spaces.Space[Any]:
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
            matrix = self._matrix.observe(state)
            return _pad(matrix, (1, self.sizes.instructions, self.sizes.columns), -1)
        assert self._graph is not None
        nodes, values = self._graph.observe(state)
        return {
            "nodes": _pad(nodes, (self.sizes.instructions, nodes.shape[1]), 0),
            "edges": _pad(self._graph.edges.copy(), (self.sizes.edges, 2), -1),
            "edge_values": _pad(values, (self.sizes.edges, values.shape[1]), 0),
        }

    def _info(self, measurement: Measurement | None) -> dict[str, Any]:
        info: dict[str, Any] = {
            "action_mask": self.action_masks(),
            "cost": self.game.start_cost / self.game.speedup,
            "ratio": self.game.speedup,
            "kind": self.kind,
        }
        if measurement is not None and measurement.failure is not None:
            info["failure"] = measurement.failure
        return info


class AssemblyGame(GameEnvironment):
    """Gymnasium environment of CuAsmRL's assembly game on one kernel.

    Actions: one line up or down for each global and shared memory access, and an action that ends
    the episode and is never legal. ``info["action_mask"]`` and :meth:`action_masks` give the legal
    actions; an illegal action changes nothing. The reward is the change of throughput in per cent
    of the original's.

    Observations: ``"matrix"`` is CuAsmRL's (float32 [1, instructions, columns]); ``"graph"`` is a
    dictionary of ``nodes`` [n, features], ``edges`` [E, 2] and ``edge_values`` [E, 3].

    ``info`` contains ``cost`` (of the current schedule, in the objective's unit), ``ratio``
    (original / current), ``kind`` (measured or modelled) and, after a failure, ``failure``. With a
    modelled objective the environment is deterministic, and the seed changes nothing.
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
        """Read the program and evaluate the start state.

        program: a cubin (path or bytes) or a :class:`Program`
        objective: an objective over the kernel's schedules, or "model" for the SM model
        kernel: name of the kernel; needed if there are several
        launch: the kernel's launch; needed for the SM model
        observation: "matrix" or "graph"
        horizon: most steps of an episode
        sizes: minimal sizes, for several kernels in one vector; padding is -1 in the matrix and
            the edges, 0 in nodes and edge values
        render_mode: "ansi" or None
        """
        read = _read_program(program)
        space = ScheduleSpace(read, read.kernel(kernel))
        self.objective = _find_objective(objective, space, launch)
        start = self.objective.evaluate([space.start()])[0]
        if start.failure is not None:
            raise BadInput(
                f"the start state cannot be measured: {start.failure}; a game needs a start that "
                "runs; make the unchanged program run first (`nostall bench` tries it alone)"
            )
        super().__init__(
            Game(space, MemorySlides(space.function, space.graph), self._evaluate, start.value),
            self.objective.kind,
            space.function,
            space.graph,
            observation=observation,
            horizon=horizon,
            sizes=sizes,
            render_mode=render_mode,
        )

    def _evaluate(self, move: ScheduleMove, state: Schedule) -> Measurement:
        return self.objective.evaluate([state])[0]


def _pad(array: NDArray[Any], shape: tuple[int, ...], value: int) -> NDArray[Any]:
    """``array`` padded with ``value`` to ``shape``."""
    if array.shape == shape:
        return array
    padded = np.full(shape, value, dtype=array.dtype)
    padded[tuple(slice(0, size) for size in array.shape)] = array
    return padded


def _read_program(program: Program | Path | str | bytes) -> Program:
    if isinstance(program, Program):
        return program
    if isinstance(program, bytes):
        return Program.from_cubin(program)
    try:
        return Program.from_cubin(Path(program).read_bytes())
    except OSError as error:
        raise BadInput(
            f"{program} cannot be read ({error.strerror}); pass the path of a .cubin, its bytes or "
            "a Program"
        ) from error


def _find_objective(
    objective: Objective[Schedule] | str, space: ScheduleSpace, launch: LaunchSpec | None
) -> Objective[Schedule]:
    if isinstance(objective, Objective):
        return objective
    if objective != "model":
        raise BadInput(
            f"the game got objective={objective!r}; allowed are 'model' or an Objective over the "
            "kernel's schedules, such as nostall.tuning.gpu_objective.GpuObjective"
        )
    if launch is None:
        raise BadInput("the game got no launch, which the SM model needs; pass launch=...")
    return SmModel(space.program, space.function, launch)


def make_vector_env(
    games: Sequence[Mapping[str, Any]],
    copies: int = 1,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
) -> SyncVectorEnv:
    """A vector environment of ``copies`` of each game.

    ``games`` are arguments of :class:`AssemblyGame`. Observations and actions have the sizes of the
    largest kernel. ``infos["action_mask"]`` holds the masks of legal actions;
    ``SyncVectorEnv.call("action_masks")`` returns them, too.
    """
    if not games or copies < 1:
        raise BadInput(
            f"a vector of games got {len(games)} games and copies={copies}; allowed is at least "
            "one of each"
        )
    sizes = reduce(or_, (AssemblyGame(**game).sizes for game in games))
    makers: list[Callable[[], gymnasium.Env[Observation, np.int64]]] = [
        partial(AssemblyGame, **{**game, "sizes": sizes}) for game in games for _ in range(copies)
    ]
    return SyncVectorEnv(makers, autoreset_mode=mode)
