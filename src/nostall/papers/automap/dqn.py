"""Deep Q-network for games with masked actions: prioritised replay, double and dueling.

Sources: DQN (Mnih et al. 2015), double (arXiv:1509.06461), dueling (arXiv:1511.06581), prioritised
replay (arXiv:1511.05952).  Auto-MAP (arXiv:2007.04069, section 5) uses these parts without noisy
layers; the defaults are its parameters.  A seed makes training deterministic on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nostall.core import BadInput
from nostall.core.errors import MissingPart

try:
    import torch
    from torch import nn
except ImportError as error:
    raise MissingPart("a DQN needs PyTorch, which is missing; pip install 'nostall[rl]'") from error

Observation = NDArray[np.float32]
Mask = NDArray[np.bool_]
"""One entry for each action: whether it is allowed."""
_SMALLEST_ERROR = 1e-3
"""Added to each error, so that every transition can be drawn again."""


class Game(Protocol):
    """A game of one player; at least one action is allowed until it ends."""

    observation_size: int
    actions: int

    def reset(self) -> tuple[Observation, Mask]:
        """Start an episode."""
        ...

    def step(self, action: int) -> tuple[Observation, Mask, float, bool]:
        """Take an action; returns the observation, the mask, the reward, and whether it ended."""
        ...


@dataclass(frozen=True, slots=True)
class DqnParameters:
    """Parameters of the learner; raises :class:`BadInput` for a value out of range."""

    hidden: int = 128
    """Units of each of two layers; the paper does not state them."""
    learning_rate: float = 5e-4
    discount: float = 0.6
    batch: int = 64
    replay: int = 2000
    priority_exponent: float = 0.2
    correction_exponent: float = 0.6
    target_interval: int = 100
    """Steps between two copies of the network to the target network."""
    first_epsilon: float = 1.0
    last_epsilon: float = 0.1
    epsilon_steps: int = 2000
    """Steps over which epsilon falls linearly."""

    def __post_init__(self) -> None:
        counts = (self.hidden, self.batch, self.target_interval, self.epsilon_steps)
        shares = (self.discount, self.first_epsilon, self.last_epsilon)
        in_range = all(0 <= share <= 1 for share in shares) and self.learning_rate > 0
        if min(counts) < 1 or self.replay < self.batch or not in_range:
            raise BadInput(
                f"{self}: allowed are counts >= 1, a replay of at least one batch, a learning rate "
                "above 0, and a discount and epsilons from 0 to 1; correct the parameters"
            )


class _Replay:
    """Ring buffer of transitions, drawn in proportion to a power of their last error."""

    def __init__(self, size: int, observation: int, actions: int) -> None:
        self.observations = np.zeros((size, observation), dtype=np.float32)
        self.next_observations = np.zeros_like(self.observations)
        self.next_masks = np.zeros((size, actions), dtype=np.bool_)
        self.actions = np.zeros(size, dtype=np.int64)
        self.rewards = np.zeros(size, dtype=np.float32)
        self.ended = np.zeros(size, dtype=np.float32)
        self.priorities = np.zeros(size)
        self.added = 0

    def __len__(self) -> int:
        return min(self.added, len(self.actions))

    def add(
        self,
        before: Observation,
        action: int,
        after: tuple[Observation, Mask, float, bool],
    ) -> None:
        place = self.added % len(self.actions)
        self.observations[place], self.actions[place] = before, action
        self.next_observations[place], self.next_masks[place] = after[0], after[1]
        self.rewards[place], self.ended[place] = after[2], after[3]
        self.priorities[place] = self.priorities.max() or 1.0
        self.added += 1

    def draw(
        self, count: int, exponent: float, correction: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Places of ``count`` transitions, and weights that correct for the way they are drawn."""
        shares = self.priorities[: len(self)] ** exponent
        shares /= shares.sum()
        places = rng.choice(len(self), size=count, p=shares)
        weights = (len(self) * shares[places]) ** -correction
        return places, (weights / weights.max()).astype(np.float32)


class _DuelingNetwork(nn.Module):  # type: ignore[misc]
    """Value of a state plus the advantage of each action over their mean."""

    def __init__(self, observation: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(observation, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, actions)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        features = self.body(observations)
        advantage = self.advantage(features)
        values: torch.Tensor = self.value(features) + advantage - advantage.mean(-1, keepdim=True)
        return values


class DqnAgent:
    """A learner for one game.

    :meth:`state` and :meth:`load` keep all that training depends on, so a resumed training takes
    the same steps as an uninterrupted one.
    """

    def __init__(
        self, observation_size: int, actions: int, parameters: DqnParameters, seed: int
    ) -> None:
        self.parameters, self.actions = parameters, actions
        self._rng = np.random.default_rng(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = _DuelingNetwork(observation_size, actions, parameters.hidden)
        self._target = copy.deepcopy(self._network)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=parameters.learning_rate)
        self._replay = _Replay(parameters.replay, observation_size, actions)
        self.steps = 0

    @property
    def epsilon(self) -> float:
        """Probability of a random action at the current step."""
        p = self.parameters
        done = min(1.0, self.steps / p.epsilon_steps)
        return p.first_epsilon + done * (p.last_epsilon - p.first_epsilon)

    def act(self, observation: Observation, mask: Mask, *, greedy: bool = False) -> int:
        """An allowed action: the best one, or with probability epsilon a random one."""
        if not greedy and self._rng.random() < self.epsilon:
            return int(self._rng.choice(np.flatnonzero(mask)))
        with torch.no_grad():
            values = self._network(torch.from_numpy(observation)[None])[0].numpy()
        return int(np.where(mask, values, -np.inf).argmax())

    def learn(
        self, before: Observation, action: int, after: tuple[Observation, Mask, float, bool]
    ) -> None:
        """Remember a transition and take one step of the optimiser."""
        p = self.parameters
        self._replay.add(before, action, after)
        self.steps += 1
        if len(self._replay) >= p.batch:
            self._update()
        if self.steps % p.target_interval == 0:
            self._target.load_state_dict(self._network.state_dict())

    def _update(self) -> None:
        p, replay = self.parameters, self._replay
        places, weights = replay.draw(
            p.batch, p.priority_exponent, p.correction_exponent, self._rng
        )
        after = torch.from_numpy(replay.next_observations[places])
        mask = torch.from_numpy(replay.next_masks[places])
        with torch.no_grad():
            # The network chooses the next action and the target network rates it (double DQN).
            allowed = self._network(after).masked_fill(~mask, -torch.inf)
            following = self._target(after).gather(1, allowed.argmax(1, keepdim=True))[:, 0]
            following = following * (1 - torch.from_numpy(replay.ended[places]))
            wanted = torch.from_numpy(replay.rewards[places]) + p.discount * following
        values = self._network(torch.from_numpy(replay.observations[places]))
        taken = torch.from_numpy(replay.actions[places])[:, None]
        errors = wanted - values.gather(1, taken)[:, 0]
        loss = (torch.from_numpy(weights) * nn.functional.huber_loss(
            errors, torch.zeros_like(errors), reduction="none"
        )).mean()  # fmt: skip
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        replay.priorities[places] = errors.detach().abs().numpy() + _SMALLEST_ERROR

    def state(self) -> dict[str, Any]:
        """Everything that training depends on, for ``torch.save``."""
        return copy.deepcopy(
            {
                "parameters": asdict(self.parameters),
                "network": self._network.state_dict(),
                "target": self._target.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "replay": vars(self._replay),
                "rng": self._rng.bit_generator.state,
                "steps": self.steps,
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned; raises :class:`BadInput` for other parameters."""
        if state["parameters"] != asdict(self.parameters):
            raise BadInput(
                f"the saved learner has parameters {state['parameters']}, and this one "
                f"{asdict(self.parameters)}; use the same"
            )
        state = copy.deepcopy(state)
        self._network.load_state_dict(state["network"])
        self._target.load_state_dict(state["target"])
        self._optimizer.load_state_dict(state["optimizer"])
        vars(self._replay).update(state["replay"])
        self._rng.bit_generator.state = state["rng"]
        self.steps = state["steps"]


def train(
    game: Game,
    agent: DqnAgent,
    steps: int,
    is_over: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Play and learn for ``steps`` steps or until ``is_over``; returns the return of each episode.

    The episode in which training stops is not listed.
    """
    returns: list[float] = []
    total = 0.0
    observation, mask = game.reset()
    for _ in range(steps):
        if is_over():
            break
        action = agent.act(observation, mask)
        after = game.step(action)
        agent.learn(observation, action, after)
        observation, mask, reward, ended = after
        total += reward
        if ended:
            returns.append(total)
            total = 0.0
            observation, mask = game.reset()
    return returns
