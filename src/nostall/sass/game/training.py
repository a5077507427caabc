"""One policy learns on many kernels, with checkpoints from which it goes on bit for bit."""

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
from nostall.core.files import write_atomically
from nostall.sass.game.edits import Edits
from nostall.sass.game.game import Game
from nostall.sass.game.learning import Learner, Player, Ppo, Size
from nostall.sass.game.openings import Openings
from nostall.sass.game.policy import GraphPolicy, layout, save_policy
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

_HEADER = "nostall.training"


@dataclass(frozen=True)
class Lesson:
    """A kernel to learn on, and what says how fast its schedules are."""

    name: str
    space: ScheduleSpace
    objective: Objective[Schedule]


@dataclass(frozen=True)
class Progress:
    """After ``rollout`` rollouts of each kernel: how learning went, the best ratio (original /
    best) met for each kernel so far."""

    rollout: int
    told: dict[str, float]
    best: dict[str, float]


def train(
    lessons: Sequence[Lesson],
    settings: Ppo,
    rollouts: int,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    keep: Path | None = None,
    observe: Callable[[Progress], None] = lambda progress: None,
) -> GraphPolicy:
    """Learn from ``rollouts`` rollouts of each lesson.

    Where ``checkpoint`` exists, training goes on from it; it is replaced after each rollout, and
    so is ``keep``, the policy file.
    Raises :class:`BadInput` when no lesson has a legal move, :class:`BadRun` for a checkpoint of
    another training.  Use inside ``kept_apart()``: the random start weights come from PyTorch's
    global generator.
    """
    pupils = [pupil for lesson in lessons if (pupil := _Pupil.of(lesson, settings)) is not None]
    if not pupils:
        raise BadInput("no kernel of the corpus has a legal move; give others with --corpus")
    torch.manual_seed(seed)
    learner = Learner(GraphPolicy(settings.width, settings.rounds), settings, seed)
    about = {"settings": asdict(settings), "seed": seed, "kernels": [p.name for p in pupils]}
    done = _restore(checkpoint, learner, pupils, about) if checkpoint else 0
    for rollout in range(done + 1, rollouts + 1):
        told = learner.learn([pupil.player for pupil in pupils])
        if checkpoint:
            write_atomically(checkpoint, _saved(learner, pupils, about, rollout))
        if keep:
            save_policy(learner.policy, keep, {**about, "rollouts": rollout})
        observe(Progress(rollout, told, {pupil.name: pupil.best for pupil in pupils}))
    return learner.policy


@dataclass
class _Pupil:
    """A lesson under way."""

    name: str
    player: Player
    openings: Openings

    @classmethod
    def of(cls, lesson: Lesson, settings: Ppo) -> _Pupil | None:
        """None for a kernel in which nothing can move, or that does not run."""
        space, objective = lesson.space, lesson.objective
        start = objective.evaluate([space.start()])[0]
        if start.failure is not None:
            return None

        def judge(move: ScheduleMove, state: Schedule) -> Measurement:
            found = objective.evaluate([state])[0]
            if found.failure is None:
                pupil.openings.met(state, start.value / found.value)
            return found

        game = Game(space, Edits(space.function, space.graph), judge, start.value)
        if not game.mask.any():
            return None
        openings = Openings()
        player = Player(game, space.function, space.graph, settings, openings)
        pupil = cls(lesson.name, player, openings)
        return pupil

    @property
    def best(self) -> float:
        """The best ratio (original / best) met so far."""
        return max([1.0, *(speed for _, speed in self.openings.best)])

    def saved(self) -> list[Any]:
        """All that :meth:`restore` needs, as JSON."""
        player, openings = self.player, self.openings
        best = [[player.game.space.dump(state), speed] for state, speed in openings.best]
        return [*astuple(player.changes), *astuple(player.rewards), openings.episodes, best]

    def restore(self, saved: list[Any]) -> None:
        """Stand where :meth:`saved` was asked."""
        *sizes, episodes, best = saved
        player = self.player
        player.changes, player.rewards = Size(*sizes[:2]), Size(*sizes[2:])
        self.openings.episodes = episodes
        self.openings.best = [(player.game.space.load(text), speed) for text, speed in best]


def _saved(
    learner: Learner, pupils: Sequence[_Pupil], about: dict[str, Any], rollout: int
) -> bytes:
    """Weights, optimiser and generator as tensors, the rest in the header."""
    tensors: dict[str, Tensor] = {"generator": learner.generator.get_state()}
    for name, value in learner.policy.state_dict().items():
        tensors[f"policy.{name}"] = value.contiguous()
    for number, state in learner.optimiser.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"adam.{number}.{name}"] = torch.as_tensor(value).contiguous()
    header = {
        **layout(),
        "about": about,
        "rollout": rollout,
        "pupils": [pupil.saved() for pupil in pupils],
    }
    data: bytes = save(tensors, {_HEADER: json.dumps(header)})
    return data


def _restore(path: Path, learner: Learner, pupils: Sequence[_Pupil], about: dict[str, Any]) -> int:
    """Take back what :func:`_saved` gave; the number of rollouts that are done."""
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise BadRun(f"{path} is no checkpoint of a training ({error}); start it anew") from error
    same = {**layout(), "about": about}
    differing = [
        key for key, value in same.items() if header.get(key) != json.loads(json.dumps(value))
    ]
    if differing:
        raise BadRun(
            f"{path} is of another training ({', '.join(differing)} differ); resume with the same "
            "corpus, seed and settings, or start anew in another directory"
        )
    groups: dict[int, dict[str, Tensor]] = {}
    weights = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "policy":
            weights[rest] = value
        elif kind == "adam":
            number, _, field = rest.partition(".")
            groups.setdefault(int(number), {})[field] = value
    learner.policy.load_state_dict(weights)
    whole = learner.optimiser.state_dict()
    learner.optimiser.load_state_dict({**whole, "state": groups})
    learner.generator.set_state(tensors["generator"])
    for pupil, saved in zip(pupils, header["pupils"], strict=True):
        pupil.restore(saved)
    return int(header["rollout"])
