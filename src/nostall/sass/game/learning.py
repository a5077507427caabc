"""Proximal policy optimisation (Schulman et al., arXiv:1707.06347) of a graph policy.

Written out because the libraries' policies have a fixed number of actions: here each state has as
many as its kernel, and one rollout holds several kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nostall.core import BadInput
from nostall.sass.game.edits import Edits
from nostall.sass.game.environment import HORIZON
from nostall.sass.game.game import Game
from nostall.sass.game.graph_view import GraphView
from nostall.sass.game.policy import GraphPolicy, Sight
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.graph import Graph

Opening = tuple[Schedule, float]
"""A state to begin an episode with, and its speed (1: the original's)."""


@dataclass(frozen=True, kw_only=True)
class Ppo:
    """Parameters of the optimisation.  ``steps`` turns of each player make a rollout."""

    steps: int = 128
    horizon: int = HORIZON
    epochs: int = 2
    minibatch: int = 32
    rate: float = 1e-3
    discount: float = 0.99
    smoothing: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    gradient: float = 0.5
    width: int = 32
    rounds: int = 3

    def __post_init__(self) -> None:
        counts = (self.steps, self.horizon, self.epochs, self.width, self.rounds)
        parts = (self.rate, self.discount, self.smoothing, self.clip, self.gradient)
        bad = min(counts) < 1 or self.minibatch < 2 or min(parts) <= 0
        if bad or min(self.entropy, self.value) < 0:
            raise BadInput(
                f"ppo got {self}; allowed are counts of at least 1, a minibatch of at least 2 and "
                "numbers above 0; leave out what you do not mean to change"
            )


class Player:
    """One kernel's game as the learner plays it.

    ``opening`` says where an episode begins (None: with the original).  Rewards are divided by
    their running root mean square, so that kernels of unlike gains teach alike.
    """

    def __init__(
        self,
        game: Game,
        function: Function,
        graph: Graph,
        horizon: int,
        opening: Callable[[], Opening | None] = lambda: None,
    ) -> None:
        self.game, self.horizon, self.opening = game, horizon, opening
        assert isinstance(game.actions, Edits)
        self._view, self._candidates = GraphView(function, graph), game.actions.candidates
        self.squares, self.seen = 0.0, 0
        self.turn = 0

    def begin(self) -> None:
        """A new episode; one that begins where nothing can move begins with the original."""
        begun = self.opening()
        self.game.reset(*(begun or ()))
        if not self.game.mask.any():
            self.game.reset()
        self.turn = 0

    def see(self) -> Sight:
        nodes, values = self._view.of(self.game.state)
        return Sight(nodes, self._view.edges, values, self._candidates, self.game.mask)

    def play(self, action: int) -> tuple[float, bool, bool]:
        """(normalised reward, game over, out of time)."""
        turn = self.game.play(action)
        self.turn += 1
        self.squares += turn.reward**2
        self.seen += 1
        scale = max(1e-3, float(np.sqrt(self.squares / self.seen)))
        reward = float(np.clip(turn.reward / scale, -10.0, 10.0))
        return reward, turn.over, self.turn >= self.horizon and not turn.over


@dataclass
class Rollout:
    """What one player lived through, turn by turn.  ``beyond`` is the worth of what would have
    come after a turn that did not go on to the next one (0 after the end of a game)."""

    sights: list[Sight] = field(default_factory=list[Sight])
    actions: list[int] = field(default_factory=list[int])
    chances: list[float] = field(default_factory=list[float])
    worths: list[float] = field(default_factory=list[float])
    rewards: list[float] = field(default_factory=list[float])
    beyond: list[float | None] = field(default_factory=list["float | None"])


class Learner:
    """A policy, its optimiser and its own generator."""

    def __init__(self, policy: GraphPolicy, settings: Ppo, seed: int) -> None:
        self.policy, self.settings = policy, settings
        self.optimiser = torch.optim.Adam(policy.parameters(), lr=settings.rate, eps=1e-5)
        self.generator = torch.Generator().manual_seed(seed)

    def learn(self, players: Sequence[Player]) -> dict[str, float]:
        """One rollout of each player and the updates that follow; what they were like."""
        rollouts = [self._roll(player) for player in players]
        told = [self._advantages(rollout) for rollout in rollouts]
        sights = [s for r in rollouts for s in r.sights]
        actions = torch.tensor([a for r in rollouts for a in r.actions])
        chances = torch.tensor([c for r in rollouts for c in r.chances])
        advantages = torch.cat([a for a, _ in told])
        returns = torch.cat([r for _, r in told])
        losses: list[list[float]] = []
        for _ in range(self.settings.epochs):
            shuffled = torch.randperm(len(sights), generator=self.generator)
            for part in shuffled.split(self.settings.minibatch):
                if len(part) > 1:
                    some = [sights[int(i)] for i in part]
                    losses.append(
                        self._update(
                            some, actions[part], chances[part], advantages[part], returns[part]
                        )
                    )
        policy, value, entropy = np.mean(losses, axis=0).tolist()
        reward = float(np.mean([x for r in rollouts for x in r.rewards]))
        return {"policy": policy, "value": value, "entropy": entropy, "reward": reward}

    def _roll(self, player: Player) -> Rollout:
        rollout = Rollout()
        player.begin()
        for step in range(self.settings.steps):
            sight = player.see()
            with torch.no_grad():
                scores, _, worth = self.policy([sight])
                drawn = torch.multinomial(scores.exp(), 1, generator=self.generator)
            action = int(drawn)
            reward, over, late = player.play(action)
            last = step + 1 == self.settings.steps
            rollout.sights.append(sight)
            rollout.actions.append(action)
            rollout.chances.append(float(scores[action]))
            rollout.worths.append(float(worth))
            rollout.rewards.append(reward)
            # Out of time is no end: more could have been earned.
            goes_on = late or (last and not over)
            rollout.beyond.append(self._worth(player) if goes_on else (0.0 if over else None))
            if (over or late) and not last:
                player.begin()
        return rollout

    def _worth(self, player: Player) -> float:
        with torch.no_grad():
            return float(self.policy([player.see()])[2])

    def _advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Generalised advantage estimates and returns."""
        s, n = self.settings, len(rollout.rewards)
        advantages, ahead = [0.0] * n, 0.0
        for t in reversed(range(n)):
            beyond = rollout.beyond[t]
            after = rollout.worths[t + 1] if beyond is None else beyond
            change = rollout.rewards[t] + s.discount * after - rollout.worths[t]
            ahead = change + (s.discount * s.smoothing * ahead if beyond is None else 0.0)
            advantages[t] = ahead
        found = torch.tensor(advantages)
        return found, found + torch.tensor(rollout.worths)

    def _update(
        self,
        sights: Sequence[Sight],
        actions: Tensor,
        chances: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> list[float]:
        s = self.settings
        scores, each, worths = self.policy(sights)
        first = torch.searchsorted(each, torch.arange(len(sights)))
        ratio = torch.exp(scores[first + actions] - chances)
        spread = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped = torch.clamp(ratio, 1 - s.clip, 1 + s.clip)
        policy = -torch.min(spread * ratio, spread * clipped).mean()
        value = torch.nn.functional.mse_loss(worths, returns)
        legal = torch.isfinite(scores)
        entropy = -(scores[legal].exp() * scores[legal]).sum() / len(sights)
        self.optimiser.zero_grad()
        (policy - s.entropy * entropy + s.value * value).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), s.gradient)
        self.optimiser.step()
        return [policy.item(), value.item(), entropy.item()]
