"""CuAsmRL (arXiv:2501.08071): the assembly game played by PPO, with the published parameters.

Taken from the ``reproduce`` branch of the authors' code: actions, observation, network, reward,
horizon and hyper-parameters.  PPO itself is sb3-contrib's MaskablePPO.  What differs:

* illegal moves are masked by the space, which knows every hazard; the published mask compares
  register names, and what it misses crashes the training;
* the best state that was met is kept, not the best end of an episode;
* the value loss takes the clipped term alone, not the larger of clipped and unclipped;
* a measured value is compared with the original beside it, not taken alone.
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
from nostall.sass.game.actions import MemorySlides
from nostall.sass.game.environment import Match, Observation
from nostall.sass.game.game import Game, playable
from nostall.sass.game.parameters import PpoParameters
from nostall.sass.schedule import ScheduleSpace
from nostall.search.episodes import Episode, EpisodeLog
from nostall.search.ledger import Ended, Ledger
from nostall.search.loop import begin

try:
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

    from nostall.sass.game.network import Convolutions
    from nostall.sass.game.randomness import kept_apart
except ImportError as error:
    raise MissingPart(
        f"strategy 'cuasmrl' needs PyTorch and sb3-contrib ({error}); the extra has them: "
        "pip install 'nostall[rl]'"
    ) from error


@dataclass(frozen=True, kw_only=True)
class Cuasmrl(PpoParameters, Search):
    """PPO on one kernel, from nothing; the defaults are the published ones.

    ``iterations`` rollouts of ``steps`` turns, each followed by ``epochs`` passes in minibatches
    of ``minibatch``; 12,800 turns, each one evaluation, and the search is finished.  The learning
    ``rate`` falls to 0 over them, however small the budget is.  ``features`` is the width of the
    dense layer.  ``logs``: a directory for TensorBoard.

    A resumed search plays its game again from the values in the checkpoint: that costs the
    learning's time, but no evaluation.
    """

    name: ClassVar[str] = "cuasmrl"

    allowed: ClassVar[str] = f"{PpoParameters.allowed}, and a minibatch that divides steps"

    iterations: int = 200
    features: int = 512
    logs: Path | None = None

    @property
    def sensible(self) -> bool:
        own = min(self.iterations, self.features) > 0
        return own and super().sensible and self.steps % self.minibatch == 0

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
        """Play until the budget or the published number of turns is spent.

        Raises :class:`BadInput` for a space that is not of SASS schedules.
        """
        level = playable(space)
        task, point = begin(self.name, space, objective, budget, seed, observers, resume, {})
        ledger = Ledger(task, point)
        stopped: Stop = "finished"
        try:
            actions = MemorySlides(level.function, level.graph)
            game = Game(cast(ScheduleSpace, space), actions, cast(Any, ledger.judge), ledger.start)
            if not game.mask.any():
                return ledger.conclude("no legal move")
            match = Match(game, objective.kind, level.function, level.graph, horizon=self.horizon)
            log = EpisodeLog(self.logs)

            def ended(turns: int, total: int, earned: float) -> None:
                rollout = (total - 1) // self.steps
                log.add(Episode(rollout, ledger.evaluations, turns, earned))

            with kept_apart():
                learner = self._learner(_UntilHorizon(match, ended), seed)
                learner.learn(self.iterations * self.steps, log_interval=1)
        except Ended:
            stopped = "budget"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return ledger.conclude(stopped)

    def _learner(self, match: _UntilHorizon, seed: int) -> MaskablePPO:
        total = self.iterations

        def rate(left: float) -> float:
            # Asked after each rollout; the published code takes the rate from before it.
            return self.rate * min(1.0, left + 1.0 / total)

        return MaskablePPO(
            MaskableActorCriticPolicy,
            match,
            learning_rate=rate,
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
                "features_extractor_class": Convolutions,
                "features_extractor_kwargs": {"features_dim": self.features},
                # Tens of millions of weights: the same steps in one pass over memory.
                "optimizer_kwargs": {"fused": True},
            },
            tensorboard_log=str(self.logs) if self.logs else None,
            seed=seed,
            device="cpu",
        )


class _UntilHorizon(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """The end of time is the end of the game, as in the published training loop: nothing is
    expected from beyond it.  ``ended`` is told an episode's turns, all turns so far, and what the
    episode earned."""

    def __init__(self, match: Match, ended: Callable[[int, int, float], None]) -> None:
        super().__init__(match)
        self._match, self._ended = match, ended
        self._total, self._earned = 0, 0.0

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._total += 1
        self._earned += float(reward)
        if terminated or truncated:
            self._ended(self._match.turn, self._total, self._earned)
            self._earned = 0.0
        return observation, float(reward), terminated or truncated, False, info
