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

from nostall.sass.game.edits import Edits
from nostall.sass.game.game import Game
from nostall.sass.game.graph_view import GraphView
from nostall.sass.game.openings import Opening
from nostall.sass.game.parameters import PpoParameters
from nostall.sass.game.policy import GraphPolicy, Sight
from nostall.sass.program.program import Function
from nostall.sass.schedule.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Ppo(PpoParameters):
    """Parameters of the optimisation, the size of its network, and how large a loss may be in parts
    of a typical change (see :class:`Player`)."""

    steps: int = 128
    epochs: int = 2
    minibatch: int = 32
    rate: float = 1e-3
    width: int = 32
    rounds: int = 3
    tolerance: float = 0.03

    @property
    def sensible(self) -> bool:
        return super().sensible and min(self.width, self.rounds) > 0 and self.tolerance >= 0


class Player:
    """One kernel's game as the learner plays it.

    ``opening`` says where an episode begins (None: with the original); ``ended`` is told its turns
    and what it earned.  A turn that loses more than ``tolerance`` of a typical change is taken
    back, as in threshold accepting (Dueck & Scheuer, J. Comput. Phys. 90, 1990): its evaluation is
    spent, nothing is earned and nothing changes.  Rewards are divided by their running root mean
    square, so that kernels of unlike gains teach alike.
    """

    def __init__(
        self,
        game: Game,
        function: Function,
        graph: Graph,
        settings: Ppo,
        opening: Callable[[], Opening | None] = lambda: None,
        ended: Callable[[int, float], None] = lambda turns, earned: None,
    ) -> None:
        self.game, self.settings, self.opening, self.ended = game, settings, opening, ended
        assert isinstance(game.actions, Edits)
        self._view, self._candidates = GraphView(function, graph), game.actions.candidates
        self._sight: Sight | None = None
        self.changes, self.rewards = Size(), Size()
        self.turn, self.earned = 0, 0.0

    def begin(self) -> None:
        """A new episode; one that begins where nothing can move begins with the original."""
        begun = self.opening()
        self.game.reset(*(begun or ()))
        if not self.game.mask.any():
            self.game.reset()
        self.turn, self.earned, self._sight = 0, 0.0, None

    def see(self) -> Sight:
        """The present state; the same object for as long as no turn changes it."""
        if self._sight is None:
            nodes, values = self._view.of(self.game.state)
            self._sight = Sight(nodes, self._view.edges, values, self._candidates, self.game.mask)
        return self._sight

    def play(self, action: int) -> tuple[float, bool, bool]:
        """(normalised reward, game over, out of time)."""
        before = self.game.state
        turn = self.game.play(action, self._keeps)
        if self.game.state is not before:
            self._sight = None
        self.turn += 1
        self.earned += turn.reward
        self.rewards.add(turn.reward)
        reward = float(np.clip(turn.reward / max(1e-3, self.rewards.typical), -10.0, 10.0))
        late = self.turn >= self.settings.horizon and not turn.over
        if turn.over or late:
            self.ended(self.turn, self.earned)
        return reward, turn.over, late

    def _keeps(self, change: float) -> bool:
        self.changes.add(change)
        return change >= -self.settings.tolerance * self.changes.typical


@dataclass
class Size:
    """Running root mean square."""

    squares: float = 0.0
    seen: int = 0

    def add(self, value: float) -> None:
        self.squares += value**2
        self.seen += 1

    @property
    def typical(self) -> float:
        return float(np.sqrt(self.squares / max(1, self.seen)))


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
        # Not by minibatch: most turns earn nothing, and where none of a minibatch does, only the
        # noise of the expectations would be left to be blown up.
        advantages = (advantages - advantages.mean()) / advantages.std().clamp(min=1.0)
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
        rollout, sight = Rollout(), None
        player.begin()
        for step in range(self.settings.steps):
            if player.see() is not sight:
                sight = player.see()
                with torch.no_grad():
                    scores, _, worth = self.policy([sight])
                    chances = scores.exp()
            action = int(torch.multinomial(chances, 1, generator=self.generator))
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
        # Turns that were taken back leave the same sight: it is looked at once.
        distinct = list({id(sight): sight for sight in sights}.values())
        number = {id(sight): n for n, sight in enumerate(distinct)}
        which = torch.tensor([number[id(sight)] for sight in sights])
        scores, each, worths = self.policy(distinct)
        first = torch.searchsorted(each, torch.arange(len(distinct)))
        ratio = torch.exp(scores[first[which] + actions] - chances)
        clipped = torch.clamp(ratio, 1 - s.clip, 1 + s.clip)
        policy = -torch.min(advantages * ratio, advantages * clipped).mean()
        value = torch.nn.functional.mse_loss(worths[which], returns)
        legal = torch.isfinite(scores)
        surprises = -(scores[legal].exp() * scores[legal])
        entropies = torch.zeros(len(distinct)).index_add(0, each[legal], surprises)
        entropy = entropies[which].mean()
        self.optimiser.zero_grad()
        (policy - s.entropy * entropy + s.value * value).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), s.gradient)
        self.optimiser.step()
        return [policy.item(), value.item(), entropy.item()]
