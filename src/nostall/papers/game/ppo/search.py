"""Strategy ``ppo``: nostall's learning search with a graph policy, trained before or not."""

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
from nostall.papers.game.edits import ScheduleEdits
from nostall.papers.game.game import Game, require_schedule_space
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove
from nostall.search import Anneal
from nostall.search.episodes import ANNEALING_MOVE, Episode, EpisodeLog
from nostall.search.evaluator import BudgetSpent, Evaluator
from nostall.search.loop import begin

try:
    import torch

    from nostall.papers.game.ppo.learner import (
        GraphPpoParameters,
        Learner,
        StartStatePool,
        TrainingEnvironment,
    )
    from nostall.papers.game.ppo.policy import GraphPolicy, load_policy
    from nostall.papers.game.randomness import isolated_random_state
except ImportError as error:
    raise MissingPart(
        f"strategy 'ppo' needs PyTorch and safetensors ({error}); install them with the extra: "
        "pip install 'nostall[rl]'"
    ) from error

MAX_KNOWN_STEPS = 4096
"""Steps in a row to known states after which the search is finished."""


class _Exhausted(Exception):
    """Ends the search because it reaches no new states; not an error."""


@dataclass(frozen=True, kw_only=True)
class PpoSearch(Search):
    """PPO over slides by several positions, stall counts and yield flags.

    Without a policy file the network begins with random weights, and annealing runs first. With a
    file the trained policy acts from the first step. Either way the policy learns during the
    search. Three of four episodes begin with one of the eight best states so far, those of the
    annealing included.

    A modelled state is evaluated once. A resumed search repeats its episodes with the values in
    the checkpoint: that takes the time of the learning, but no evaluation.
    """

    name: ClassVar[str] = "ppo"

    settings: GraphPpoParameters = field(default_factory=GraphPpoParameters)
    policy: Path | None = None
    """A policy file of ``nostall train``."""
    annealing_evaluations: int = 512
    """Evaluations of the annealing that runs first without a policy file."""
    logs: Path | None = None
    """Directory for TensorBoard and for the episode log."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            load_policy(self.policy)  # a file that cannot be used is refused before any work
        if self.annealing_evaluations < 0:
            raise BadInput(
                f"ppo got annealing_evaluations={self.annealing_evaluations}; allowed are numbers "
                "from 0; leave it out for the default of 512"
            )

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
        """Learn until the budget is spent or no new states are reached.

        Raises :class:`BadInput` for a space without SASS schedules, or for a file that is no
        policy for this version of nostall.
        """
        schedule_space = require_schedule_space(space)
        trained = load_policy(self.policy)[0] if self.policy else None
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, {})
        evaluator = Evaluator(task, point)
        stopped: Stop = "finished"
        try:
            cache = _CachedEvaluator(
                cast("Evaluator[Schedule, ScheduleMove]", evaluator), objective.kind
            )
            schedules = cast("Space[Schedule, ScheduleMove]", space)
            actions = ScheduleEdits(schedule_space.function, schedule_space.graph)
            game = Game(schedules, actions, cache, evaluator.start_value)
            if not game.mask.any():
                return evaluator.conclude("no legal move")
            with isolated_random_state():
                torch.manual_seed(seed)
                policy = trained or GraphPolicy(self.settings.width, self.settings.rounds)
                if trained is None:
                    cache.anneal(schedules, self.annealing_evaluations, seed)
                self._learn(Learner(policy, self.settings, seed), game, schedule_space, cache)
        except BudgetSpent:
            stopped = "budget"
        except _Exhausted:
            stopped = "finished"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return evaluator.conclude(stopped)

    def _learn(
        self, learner: Learner, game: Game, space: ScheduleSpace, cache: _CachedEvaluator
    ) -> None:
        """Collect rollouts and update the policy until the evaluator raises an exception."""

        def on_episode(steps: int, total_reward: float) -> None:
            episodes.add(Episode(rollout, cache.evaluator.evaluations, steps, total_reward))

        environment = TrainingEnvironment(
            game, space.function, space.graph, self.settings, cache.pool.next_start, on_episode
        )
        write_scalar, episodes = scalar_writer(self.logs), EpisodeLog(self.logs)
        rollout = 0
        while True:
            for name, value in learner.learn([environment]).items():
                write_scalar(f"ppo/{name}", value, rollout)
            rollout += 1


class _CachedEvaluator:
    """Evaluates each modelled state once, and collects the best states for new episodes."""

    def __init__(self, evaluator: Evaluator[Schedule, ScheduleMove], kind: str) -> None:
        self.evaluator = evaluator
        self._known: dict[bytes, Measurement] | None = {} if kind == "modelled" else None
        self._known_steps = 0
        self.pool = StartStatePool()

    def __call__(self, move: ScheduleMove, state: Schedule) -> Measurement:
        if self._known is None:
            return self._evaluate(move, state)
        key = state.key()
        if key in self._known:
            self._known_steps += 1
            if self._known_steps >= MAX_KNOWN_STEPS:
                raise _Exhausted
            return self._known[key]
        self._known_steps = 0
        measurement = self._known[key] = self._evaluate(move, state)
        return measurement

    def _evaluate(self, move: ScheduleMove, state: Schedule) -> Measurement:
        measurement = self.evaluator.evaluate(move, state)
        if measurement.failure is None:
            self.pool.add(state, self.evaluator.start_value / measurement.value)
        return measurement

    def anneal(self, space: Space[Schedule, ScheduleMove], evaluations: int, seed: int) -> None:
        """Evaluate states by annealing, which fills the pool of start states."""
        if not evaluations:
            return
        # The start state is known, so its evaluation is not one of them.
        budget = Budget(evaluations=evaluations + 1)
        result = Anneal().run(space, _as_objective(self, space), budget, seed=seed)
        if result.stopped == "interrupted":
            raise KeyboardInterrupt


def _as_objective(
    cache: _CachedEvaluator, space: Space[Schedule, ScheduleMove]
) -> Objective[Schedule]:
    """An objective that evaluates through the cache, except for the start state."""
    task, start_value = cache.evaluator.task, cache.evaluator.start_value
    start_key = space.key(space.start())

    class CachedObjective(Objective[Schedule]):
        kind = task.objective.kind
        unit = task.objective.unit

        def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
            return [self._evaluate(state) for state in states]

        def _evaluate(self, state: Schedule) -> Measurement:
            if state.key() == start_key:
                return Measurement(self.unit, (start_value,), self.kind)
            return cache(cast(ScheduleMove, ANNEALING_MOVE), state)

    return CachedObjective()


def scalar_writer(logs: Path | None) -> Callable[[str, float, int], Any]:
    """A function that writes (name, value, step) to TensorBoard; does nothing without ``logs``."""
    if logs is None:
        return lambda name, value, step: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPart(
            f"TensorBoard logs need tensorboard ({error}); install it with the extra: "
            "pip install 'nostall[rl]'"
        ) from error
    writer: Callable[[str, float, int], Any] = SummaryWriter(str(logs)).add_scalar
    return writer
