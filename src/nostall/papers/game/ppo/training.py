"""Training of one policy on many kernels, with checkpoints that resume bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nostall.core import BadInput, BadRun, Measurement, Objective
from nostall.core.files.atomic import write_atomically
from nostall.core.validation import parse_json
from nostall.papers.game.edits import ScheduleEdits
from nostall.papers.game.game import Game
from nostall.papers.game.ppo.learner import (
    GraphPpoParameters,
    Learner,
    RunningRms,
    StartStatePool,
    TrainingEnvironment,
)
from nostall.papers.game.ppo.policy import (
    GraphPolicy,
    layout,
    load_weights,
    policy_weights,
    save_policy,
)
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

_HEADER = "nostall.training"


@dataclass(frozen=True)
class TrainingKernel:
    """A kernel to train on, and the objective over its schedules."""

    name: str
    space: ScheduleSpace
    objective: Objective[Schedule]


@dataclass(frozen=True)
class Progress:
    """Progress of a training after a number of rollouts of each kernel."""

    rollout: int
    metrics: dict[str, float]
    """Mean losses, entropy and reward of the last rollout."""
    best: dict[str, float]
    """Kernel -> best ratio (original / best) so far."""


def train(
    kernels: Sequence[TrainingKernel],
    parameters: GraphPpoParameters,
    rollouts: int,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    policy_path: Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
) -> GraphPolicy:
    """Train a policy with ``rollouts`` rollouts of each kernel.

    If the file ``checkpoint`` exists, the training resumes from it. After each rollout the
    checkpoint and the policy file ``policy_path`` are replaced.

    Raises :class:`BadInput` if no kernel has a legal action, and :class:`BadRun` for a checkpoint
    of another training. Call this inside ``isolated_random_state()``: the initial weights come from
    PyTorch's global generator.
    """
    trainees = [t for kernel in kernels if (t := _Trainee.start(kernel, parameters)) is not None]
    if not trainees:
        raise BadInput("no kernel of the corpus has a legal move; pass others with --corpus")
    torch.manual_seed(seed)
    learner = Learner(GraphPolicy(parameters.width, parameters.rounds), parameters, seed)
    about = {"settings": asdict(parameters), "seed": seed, "kernels": [t.name for t in trainees]}
    done = _load_checkpoint(checkpoint, learner, trainees, about) if checkpoint else 0
    for rollout in range(done + 1, rollouts + 1):
        metrics = learner.learn([trainee.environment for trainee in trainees])
        if checkpoint:
            write_atomically(checkpoint, _dump_checkpoint(learner, trainees, about, rollout))
        if policy_path:
            save_policy(learner.policy, policy_path, {**about, "rollouts": rollout})
        observe(Progress(rollout, metrics, {t.name: t.best_ratio for t in trainees}))
    return learner.policy


@dataclass
class _Trainee:
    """A kernel with its environment during the training."""

    name: str
    environment: TrainingEnvironment
    pool: StartStatePool

    @classmethod
    def start(cls, kernel: TrainingKernel, parameters: GraphPpoParameters) -> _Trainee | None:
        """Set up a kernel; None if the kernel does not run or nothing in it can move."""
        space, objective = kernel.space, kernel.objective
        start = objective.evaluate([space.start()])[0]
        if start.failure is not None:
            return None
        pool = StartStatePool()

        def evaluate(move: ScheduleMove, state: Schedule) -> Measurement:
            measurement = objective.evaluate([state])[0]
            if measurement.failure is None:
                pool.add(state, start.value / measurement.value)
            return measurement

        game = Game(space, ScheduleEdits(space.function, space.graph), evaluate, start.value)
        if not game.mask.any():
            return None
        environment = TrainingEnvironment(
            game, space.function, space.graph, parameters, pool.next_start
        )
        return cls(kernel.name, environment, pool)

    @property
    def best_ratio(self) -> float:
        """The best ratio (original / best) so far."""
        return max([1.0, *(speedup for _, speedup in self.pool.best)])

    def dump(self) -> list[Any]:
        """The state of the kernel's training, as JSON."""
        environment, pool = self.environment, self.pool
        space = environment.game.space
        best = [[space.dump(state), speedup] for state, speedup in pool.best]
        changes, rewards = astuple(environment.changes), astuple(environment.rewards)
        return [*changes, *rewards, pool.episodes, best]

    def load(self, saved: list[Any]) -> None:
        """Restore the state that :meth:`dump` returned."""
        *sizes, episodes, best = saved
        environment = self.environment
        environment.changes, environment.rewards = RunningRms(*sizes[:2]), RunningRms(*sizes[2:])
        space = environment.game.space
        self.pool.episodes = episodes
        self.pool.best = [(space.load(text), speedup) for text, speedup in best]


def _dump_checkpoint(
    learner: Learner, trainees: Sequence[_Trainee], about: dict[str, Any], rollout: int
) -> bytes:
    """A checkpoint: weights, optimiser and generator as tensors, the rest as a JSON header."""
    tensors: dict[str, Tensor] = {"generator": learner.generator.get_state()}
    for name, value in policy_weights(learner.policy).items():
        tensors[f"policy.{name}"] = value
    for number, state in learner.optimiser.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"adam.{number}.{name}"] = torch.as_tensor(value).contiguous()
    header = {
        **layout(),
        "about": about,
        "rollout": rollout,
        "pupils": [trainee.dump() for trainee in trainees],
    }
    data: bytes = save(tensors, {_HEADER: json.dumps(header)})
    return data


def _load_checkpoint(
    path: Path, learner: Learner, trainees: Sequence[_Trainee], about: dict[str, Any]
) -> int:
    """Restore a checkpoint if the file exists; returns the number of finished rollouts."""
    if not path.exists():
        return 0
    header, tensors = _read_checkpoint(path)
    expected = {**layout(), "about": about}
    differing = [
        key for key, value in expected.items() if header.get(key) != json.loads(json.dumps(value))
    ]
    if differing:
        raise BadRun(
            f"{path} is of another training ({', '.join(differing)} differ); resume with the same "
            "corpus, seed and settings, or start a new training in another directory"
        )
    optimiser_state: dict[int, dict[str, Tensor]] = {}
    weights = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "policy":
            weights[rest] = value
        elif kind == "adam":
            number, _, field = rest.partition(".")
            optimiser_state.setdefault(int(number), {})[field] = value
    load_weights(learner.policy, weights)
    state_dict = learner.optimiser.state_dict()
    learner.optimiser.load_state_dict({**state_dict, "state": optimiser_state})
    learner.generator.set_state(tensors["generator"])
    for trainee, saved in zip(trainees, header["pupils"], strict=True):
        trainee.load(saved)
    return int(header["rollout"])


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a checkpoint; raises :class:`BadRun` for any other file."""
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = parse_json((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise BadRun(
            f"{path} is no checkpoint of a training ({error}); start a new training"
        ) from error
    return header, tensors
