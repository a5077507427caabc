"""Nostall's learning strategy: PPO with a graph network, from nothing or from a policy file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from nostall.core import (
    BadInput,
    Budget,
    Checkpoint,
    Measurement,
    MissingPart,
    Objective,
    Observer,
    Search,
    SearchResult,
    Space,
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.sass.game.edits import Edits
from nostall.sass.game.game import Game, playable
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove
from nostall.search import Anneal
from nostall.search.episodes import SEEDING, Episode, EpisodeLog
from nostall.search.ledger import Ended, Ledger
from nostall.search.loop import begin

try:
    import torch

    from nostall.sass.game.learning import Learner, Player, Ppo
    from nostall.sass.game.openings import Openings
    from nostall.sass.game.policy import GraphPolicy, load_policy
    from nostall.sass.game.randomness import kept_apart
except ImportError as error:
    raise MissingPart(
        f"strategy 'ppo' needs PyTorch and safetensors ({error}); the extra has them: "
        "pip install 'nostall[rl]'"
    ) from error

_IDLE = 4096
"""Turns in a row that met only known states, after which the game is over."""


class _Exhausted(Exception):
    """Nothing new was met for long; not an error."""


@dataclass(frozen=True, kw_only=True)
class LearnedSearch(Search):
    """PPO that slides instructions over several places and changes control codes.

    Without a ``policy`` file the network begins with random weights and the first ``seeds``
    evaluations are annealing.  With one, the trained policy plays at once; either way it goes on
    learning.  Three of four episodes begin with one of the eight best states that were met so far,
    those of the annealing included.
    ``logs``: a directory for TensorBoard and for what each episode earned.

    A modelled state is charged once.  When ``_IDLE`` turns in a row met only known states, the
    search is finished.  A resumed search plays its game again from the values in the checkpoint:
    that costs the learning's time, but no evaluation.
    """

    name: ClassVar[str] = "ppo"

    settings: Ppo = field(default_factory=Ppo)
    policy: Path | None = None
    seeds: int = 512
    logs: Path | None = None

    def __post_init__(self) -> None:
        if self.seeds < 0:
            raise BadInput(f"ppo got seeds={self.seeds}; allowed are numbers from 0")

    def run(
        self,
        space: Space[S, M],
        objective: Objective[S],
        budget: Budget,
        *,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resume: Checkpoint | None = None,
    ) -> SearchResult[S]:
        """Play and learn until the budget is spent.

        Raises :class:`BadInput` for a space that is not of SASS schedules, or a file that is no
        policy for this nostall.
        """
        level = playable(space)
        trained = load_policy(self.policy)[0] if self.policy else None
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, {})
        ledger = Ledger(task, point)
        stopped: Stop = "finished"
        try:
            judge = _Memory(cast("Ledger[Schedule, ScheduleMove]", ledger), objective.kind)
            schedules = cast("Space[Schedule, ScheduleMove]", space)
            actions = Edits(level.function, level.graph)
            game = Game(schedules, actions, judge, ledger.start)
            if not game.mask.any():
                return ledger.conclude("no legal move")
            with kept_apart():
                torch.manual_seed(seed)
                policy = trained or GraphPolicy(self.settings.width, self.settings.rounds)
                if trained is None:
                    judge.anneal(schedules, self.seeds, seed)
                self._play(Learner(policy, self.settings, seed), game, level, judge)
        except Ended:
            stopped = "budget"
        except _Exhausted:
            stopped = "finished"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return ledger.conclude(stopped)

    def _play(self, learner: Learner, game: Game, level: ScheduleSpace, memory: _Memory) -> None:
        """Rollouts and updates without end; the ledger ends them."""

        def ended(turns: int, earned: float) -> None:
            kept.add(Episode(rollout, memory.ledger.evaluations, turns, earned))

        player = Player(game, level.function, level.graph, self.settings, memory.openings, ended)
        log, kept = curves(self.logs), EpisodeLog(self.logs)
        rollout = 0
        while True:
            for name, value in learner.learn([player]).items():
                log(f"ppo/{name}", value, rollout)
            rollout += 1


class _Memory:
    """Asks the ledger for values, for each modelled state once."""

    def __init__(self, ledger: Ledger[Schedule, ScheduleMove], kind: str) -> None:
        self.ledger = ledger
        self._known: dict[bytes, Measurement] | None = {} if kind == "modelled" else None
        self._idle = 0
        self.openings = Openings()

    def __call__(self, move: ScheduleMove, state: Schedule) -> Measurement:
        if self._known is None:
            return self._ask(move, state)
        key = state.key()
        if key in self._known:
            self._idle += 1
            if self._idle >= _IDLE:
                raise _Exhausted
            return self._known[key]
        self._idle = 0
        measurement = self._known[key] = self._ask(move, state)
        return measurement

    def _ask(self, move: ScheduleMove, state: Schedule) -> Measurement:
        measurement = self.ledger.judge(move, state)
        if measurement.failure is None:
            self.openings.met(state, self.ledger.start / measurement.value)
        return measurement

    def anneal(self, space: Space[Schedule, ScheduleMove], evaluations: int, seed: int) -> None:
        """Meet states by a short annealing."""
        if not evaluations:
            return
        budget = Budget(evaluations=evaluations + 1)
        found = Anneal().run(space, _asking(self, space), budget, seed=seed)
        if found.stopped == "interrupted":
            raise KeyboardInterrupt


def _asking(memory: _Memory, space: Space[Schedule, ScheduleMove]) -> Objective[Schedule]:
    """The memory as an objective; the start state is known."""
    task, start = memory.ledger.task, memory.ledger.start
    first = space.key(space.start())

    class Asking(Objective[Schedule]):
        kind = task.objective.kind
        unit = task.objective.unit

        def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
            return [self._ask(state) for state in states]

        def _ask(self, state: Schedule) -> Measurement:
            if state.key() == first:
                return Measurement(self.unit, (start,), self.kind)
            return memory(cast(ScheduleMove, SEEDING), state)

    return Asking()


def curves(logs: Path | None) -> Callable[[str, float, int], Any]:
    """What takes (name, value, number) to TensorBoard, or nowhere without a directory."""
    if logs is None:
        return lambda name, value, number: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPart(
            f"the curves need tensorboard ({error}); the extra has it: pip install 'nostall[rl]'"
        ) from error
    writer: Callable[[str, float, int], Any] = SummaryWriter(str(logs)).add_scalar
    return writer
