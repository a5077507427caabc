"""Strategy ``cuasmrl``: CuAsmRL's PPO on the assembly game (arXiv:2501.08071).

Actions, observation, network, reward, horizon and hyperparameters are those of the ``reproduce``
branch of the authors' code. PPO itself is sb3-contrib's MaskablePPO. Differences:

* The space, which derives all hazards, masks illegal moves. The published mask compares register
  names; the moves that it misses crash the training.
* The result is the best state of all, not the best last state of an episode.
* The value loss is the clipped term alone, not the larger of clipped and unclipped.
* A measured value is compared with the original beside it, not taken alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np

from nostall.core import (
    Budget,
    Checkpoint,
    MissingPart,
    Objective,
    Observer,
    Search,
    SearchResult,
    Space,
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.papers.game.actions import MemorySlides
from nostall.papers.game.environment import GameEnvironment, Observation
from nostall.papers.game.game import Game, require_schedule_space
from nostall.papers.game.parameters import PpoParameters
from nostall.sass.schedule import ScheduleSpace
from nostall.search.episodes import Episode, EpisodeLog
from nostall.search.evaluator import BudgetSpent, Evaluator
from nostall.search.loop import begin

try:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

    from nostall.papers.game.cuasmrl.network import ConvolutionalExtractor
    from nostall.papers.game.randomness import isolated_random_state
except ImportError as error:
    raise MissingPart(
        f"strategy 'cuasmrl' needs PyTorch and sb3-contrib ({error}); install them with the extra: "
        "pip install 'nostall[rl]'"
    ) from error


@dataclass(frozen=True, kw_only=True)
class Cuasmrl(PpoParameters, Search):
    """PPO on one kernel from random weights; the defaults are the published ones.

    The search is finished after ``iterations`` rollouts: 12,800 steps by default, each of which is
    one evaluation. The learning rate falls to 0 over these steps, even if the budget ends earlier.

    A resumed search repeats its episodes with the values in the checkpoint: that takes the time of
    the learning, but no evaluation.
    """

    name: ClassVar[str] = "cuasmrl"
    strategy: ClassVar[str] = "cuasmrl"
    allowed: ClassVar[str] = f"{PpoParameters.allowed}, and a minibatch that divides steps"

    iterations: int = 200
    """Number of rollouts."""
    features: int = 512
    """Width of the dense layer."""
    logs: Path | None = None
    """Directory for TensorBoard and for the episode log."""

    @property
    def is_valid(self) -> bool:
        counts_valid = min(self.iterations, self.features) > 0
        return counts_valid and super().is_valid and self.steps % self.minibatch == 0

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
        """Learn until the budget or the published number of steps is spent.

        Raises :class:`BadInput` for a space without SASS schedules.
        """
        schedule_space = require_schedule_space(space)
        function, graph = schedule_space.function, schedule_space.graph
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, {})
        evaluator = Evaluator(task, point)
        stopped: Stop = "finished"
        try:
            game = Game(
                cast(ScheduleSpace, space),
                MemorySlides(function, graph),
                cast(Any, evaluator.evaluate),
                evaluator.start_value,
            )
            if not game.mask.any():
                return evaluator.conclude("no legal move")
            environment = GameEnvironment(
                game, objective.kind, function, graph, horizon=self.horizon
            )
            log = EpisodeLog(self.logs)

            def on_episode(steps: int, total_steps: int, total_reward: float) -> None:
                rollout = (total_steps - 1) // self.steps
                log.add(Episode(rollout, evaluator.evaluations, steps, total_reward))

            with isolated_random_state():
                learner = self._learner(_TerminatesAtHorizon(environment, on_episode), seed)
                learner.learn(self.iterations * self.steps, log_interval=1)
        except BudgetSpent:
            stopped = "budget"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return evaluator.conclude(stopped)

    def _learner(self, environment: _TerminatesAtHorizon, seed: int) -> MaskablePPO:
        iterations = self.iterations

        def learning_rate(remaining: float) -> float:
            # The library computes the rate after a rollout; the published code, before it.
            return self.rate * min(1.0, remaining + 1.0 / iterations)

        return MaskablePPO(
            MaskableActorCriticPolicy,
            environment,
            learning_rate=learning_rate,
            n_steps=self.steps,
            batch_size=self.minibatch,
            n_epochs=self.epochs,
            gamma=self.discount,
            gae_lambda=self.smoothing,
            clip_range=self.clip,
            clip_range_vf=self.clip,
            ent_coef=self.entropy,
            # The published loss has half the squared error.
            vf_coef=self.value / 2,
            max_grad_norm=self.gradient,
            policy_kwargs={
                "net_arch": [],
                "features_extractor_class": ConvolutionalExtractor,
                "features_extractor_kwargs": {"features_dim": self.features},
                # The same update in one pass over the tens of millions of weights.
                "optimizer_kwargs": {"fused": True},
            },
            tensorboard_log=str(self.logs) if self.logs else None,
            seed=seed,
            device="cpu",
        )


class _TerminatesAtHorizon(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """Turns truncation into termination, as in the published training loop.

    So the last state of an episode has no value. ``on_episode`` receives the steps of an episode,
    the steps of all episodes so far, and the total reward of the episode.
    """

    def __init__(
        self, environment: GameEnvironment, on_episode: Callable[[int, int, float], None]
    ) -> None:
        super().__init__(environment)
        self._environment, self._on_episode = environment, on_episode
        self._total_steps, self._total_reward = 0, 0.0

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._total_steps += 1
        self._total_reward += float(reward)
        if terminated or truncated:
            self._on_episode(self._environment.steps, self._total_steps, self._total_reward)
            self._total_reward = 0.0
        return observation, float(reward), terminated or truncated, False, info
