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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np

from nostall.core import (
    BadInput,
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
from nostall.sass.game.environment import HORIZON, Match, Observation
from nostall.sass.game.game import Game, playable
from nostall.sass.schedule import ScheduleSpace
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
class Cuasmrl(Search):
    """PPO on one kernel, from nothing; the defaults are the published ones.

    ``iterations`` rollouts of ``steps`` turns, each followed by ``epochs`` passes in minibatches
    of ``minibatch``; 12,800 turns, each one evaluation, and the search is finished.  The learning
    ``rate`` falls to 0 over them, however small the budget is.  ``features`` is the width of the
    dense layer.  ``logs``: a directory for TensorBoard.

    A resumed search plays its game again from the values in the checkpoint: that costs the
    learning's time, but no evaluation.
    """

    name: ClassVar[str] = "cuasmrl"

    iterations: int = 200
    steps: int = 64
    horizon: int = HORIZON
    epochs: int = 4
    minibatch: int = 8
    rate: float = 2.5e-4
    discount: float = 0.99
    smoothing: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    gradient: float = 0.5
    features: int = 512
    logs: Path | None = None

    def __post_init__(self) -> None:
        counts = (self.iterations, self.horizon, self.epochs, self.features)
        parts = (self.rate, self.discount, self.smoothing, self.clip, self.gradient)
        whole = self.minibatch > 1 and self.steps > 0 and self.steps % self.minibatch == 0
        if min(counts) < 1 or not whole or min(parts) <= 0 or min(self.entropy, self.value) < 0:
            raise BadInput(
                f"cuasmrl got {self}; allowed are counts of at least 1, a minibatch of at least 2 "
                "that divides steps, and numbers above 0; leave out what you do not mean to change"
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
            with kept_apart():
                self._learner(match, seed).learn(self.iterations * self.steps, log_interval=1)
        except Ended:
            stopped = "budget"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return ledger.conclude(stopped)

    def _learner(self, match: Match, seed: int) -> MaskablePPO:
        total = self.iterations

        def rate(left: float) -> float:
            # Asked after each rollout; the published code takes the rate from before it.
            return self.rate * min(1.0, left + 1.0 / total)

        return MaskablePPO(
            MaskableActorCriticPolicy,
            _UntilHorizon(match),
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
            },
            tensorboard_log=str(self.logs) if self.logs else None,
            seed=seed,
            device="cpu",
        )


class _UntilHorizon(gymnasium.Wrapper[Observation, np.int64, Observation, np.int64]):
    """The end of time is the end of the game, as in the published training loop: nothing is
    expected from beyond it."""

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward), terminated or truncated, False, info
