"""The DQN learner: masks, learning on a small game, determinism, resumption."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="a DQN needs the extra nostall[rl]")

from nostall.core import BadInput
from nostall.papers.automap.dqn import DqnAgent, DqnParameters, train

LENGTH = 4
PARAMETERS = DqnParameters(
    hidden=16, learning_rate=5e-3, discount=0.9, batch=16, replay=256, epsilon_steps=300
)


class Corridor:
    """Walk right to the end for a reward of 1; a step left is free, and stepping out is masked."""

    observation_size, actions = LENGTH, 2

    def __init__(self) -> None:
        self.masked_actions = 0
        self.reset()

    def reset(self) -> tuple[Any, Any]:
        self.place = 0
        return self._observe()

    def step(self, action: int) -> tuple[Any, Any, float, bool]:
        self.masked_actions += action == 0 and self.place == 0
        self.place += 1 if action == 1 else -1
        ended = self.place == LENGTH - 1
        return (*self._observe(), float(ended), ended)

    def _observe(self) -> tuple[Any, Any]:
        observation = np.eye(LENGTH, dtype=np.float32)[self.place]
        return observation, np.array([self.place > 0, True])


def test_it_learns_the_shortest_way_and_never_takes_a_masked_action() -> None:
    game = Corridor()
    agent = DqnAgent(game.observation_size, game.actions, PARAMETERS, seed=0)
    returns = train(game, agent, 400)
    assert game.masked_actions == 0
    assert set(returns) == {1.0}
    observation, mask = game.reset()
    for _ in range(LENGTH - 1):
        action = agent.act(observation, mask, greedy=True)
        assert action == 1
        observation, mask, _, _ = game.step(action)
    assert agent.epsilon == pytest.approx(PARAMETERS.last_epsilon)


def test_a_seed_determines_the_training_and_a_saved_learner_goes_on() -> None:
    game, other = Corridor(), Corridor()
    agent, twin = (DqnAgent(LENGTH, 2, PARAMETERS, seed=1) for _ in range(2))
    assert train(game, agent, 100) == train(other, twin, 100)
    saved = agent.state()
    resumed = DqnAgent(LENGTH, 2, PARAMETERS, seed=9)
    resumed.load(saved)
    game.reset()
    assert train(Corridor(), resumed, 40) == train(Corridor(), twin, 40)
    for name, value in resumed.state()["network"].items():
        assert (value == twin.state()["network"][name]).all(), name


def test_parameters_out_of_range_and_of_another_learner_are_refused() -> None:
    with pytest.raises(BadInput, match="at least one batch"):
        DqnParameters(batch=64, replay=32)
    other = DqnAgent(LENGTH, 2, DqnParameters(), seed=0)
    with pytest.raises(BadInput, match="use the same"):
        other.load(DqnAgent(LENGTH, 2, PARAMETERS, seed=0).state())
