"""The game on PTX meets Gymnasium's contract, and each state that it reaches is proved equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the game needs the extra nostall[rl]")

import gymnasium
from gymnasium.utils.env_checker import check_env

from nostall.core import BadInput, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.papers.ptx_game import ID, PtxGame
from nostall.papers.ptx_game.environment import FEATURES
from nostall.ptx.safety.validate import Validator
from nostall.ptx.schedule.state import PtxState
from tests.unit.ptx.ptx_texts import FEW, corpus_module
from tests.unit.tuning.assembler.kernel import PTX


class EarlyLoads(Objective[PtxState]):
    """Less time the earlier odd units stand; states beyond ``works`` evaluations fail."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, works: int = 10_000) -> None:
        self.works = works

    def evaluate(self, states: Sequence[PtxState]) -> list[Measurement]:
        return [self._evaluate(state) for state in states]

    def _evaluate(self, state: PtxState) -> Measurement:
        self.works -= 1
        if self.works < 0:
            return Measurement("s", (), "modelled", failure="on purpose")
        places = [at for order in state.orders for at, unit in enumerate(order) if unit % 2]
        return Measurement("s", (1.0 + 1e-3 * sum(places),), "modelled")


def make(**options: object) -> PtxGame:
    return PtxGame(**{"ptx": PTX, "objective": EarlyLoads(), **options})  # type: ignore[arg-type]


def test_it_passes_the_environment_checker(tmp_path: Path) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(PTX)
    env = gymnasium.make(ID, ptx=path, objective=EarlyLoads(), render_mode="ansi")
    check_env(env.unwrapped)
    env.reset()
    assert env.unwrapped.render() == PTX


def test_gymnasium_finds_the_game_without_an_import() -> None:
    env = gymnasium.make(
        "nostall.papers.ptx_game:nostall/PtxGame-v0", ptx=PTX, objective=EarlyLoads()
    )
    assert env.reset(seed=0)[1]["action_mask"].any()


@pytest.mark.parametrize("name", ["", FEW[0]])
def test_legal_actions_lead_to_states_that_are_proved_equal(name: str) -> None:
    module = corpus_module(name) if name else None
    text, kernel = (PTX, "scale") if module is None else (module.text, module.kernels[0].name)
    game, rng = make(ptx=text, kernel=kernel, horizon=12), np.random.default_rng(0)
    validator = Validator(text)
    _, info = game.reset()
    for _ in range(12):
        action = int(rng.choice(np.flatnonzero(info["action_mask"])))
        observation, _, terminated, truncated, info = game.step(action)
        assert game.observation_space.contains(observation)
        assert validator.check(game.space.text(game.state)).accepted
        assert not terminated
    assert truncated
    # The mask of the changed block alone equals that of all blocks.
    np.testing.assert_array_equal(game.action_masks(), game.actions.mask(game.state))


def test_the_reward_is_the_change_of_throughput() -> None:
    game = make()
    _, info = game.reset()
    total = 0.0
    for _ in range(10):
        action = int(np.flatnonzero(info["action_mask"])[-1])
        _, reward, _, _, info = game.step(action)
        total += reward
    assert total == pytest.approx(100 * (info["ratio"] - 1))
    assert info["cost"] == pytest.approx(game.start_cost / info["ratio"])


def test_illegal_last_and_failed_actions() -> None:
    game = make()
    game.reset()
    illegal = int(np.flatnonzero(~game.action_masks())[0])
    state = game.state
    _, reward, terminated, _, _ = game.step(illegal)
    assert (reward, terminated, game.state) == (0.0, False, state)
    assert game.step(game.actions.count - 1)[1:3] == (0.0, True)
    failing = make(objective=EarlyLoads(works=1))
    failing.reset()
    _, reward, terminated, _, info = failing.step(int(np.flatnonzero(failing.action_masks())[0]))
    assert (reward, terminated, info["failure"]) == (-1.0, True, "on purpose")


def test_a_game_without_a_start_or_an_action_is_refused() -> None:
    with pytest.raises(BadInput, match="on purpose"):
        make(objective=EarlyLoads(works=0))
    empty = ".version 8.0\n.target sm_80\n.visible .entry k()\n{\n ret;\n}\n"
    with pytest.raises(BadInput, match="no memory access"):
        make(ptx=empty)
    with pytest.raises(BadInput, match="horizon=0"):
        make(horizon=0)


@pytest.mark.slow
def test_the_published_learner_plays_it() -> None:
    contrib = pytest.importorskip("sb3_contrib", reason="needs the extra nostall[rl]")
    game = make(horizon=8)
    learner = contrib.MaskablePPO("MlpPolicy", game, n_steps=16, batch_size=16, seed=0)
    learner.learn(32)
    observation, info = game.reset()
    action, _ = learner.predict(observation, action_masks=info["action_mask"])
    assert info["action_mask"][int(action)]
    assert observation.shape[-1] == len(FEATURES)
