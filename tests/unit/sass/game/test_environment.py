"""The environment keeps Gymnasium's contract, and its rewards are the objective's."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the game needs the extra nostall[rl]")

import gymnasium
from gymnasium.utils.env_checker import check_env
from tests.unit.sass.game.kernels import CORPUS, NVCC, largest, launch, model, transpose

from nostall.core import BadInput, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.sass.game import ID, AssemblyGame, vectorised
from nostall.sass.schedule import Schedule

BOTH = pytest.mark.parametrize("observation", ["matrix", "graph"])
TRANSPOSE = {"program": transpose().program, "objective": model(transpose())}
LARGER = largest(CORPUS / "memory.sm_75.cubin")
OTHER = {
    "program": LARGER.program,
    "objective": model(LARGER),
    "kernel": LARGER.function.name,
}


def played(game: AssemblyGame, seed: int, turns: int = 40) -> list[tuple]:
    """What random legal play sees; the episode begins anew when it is over."""
    rng, seen = np.random.default_rng(seed), []
    _, info = game.reset(seed=seed)
    for _ in range(turns):
        action = int(rng.choice(np.flatnonzero(info["action_mask"])))
        observation, reward, terminated, truncated, info = game.step(action)
        assert game.observation_space.contains(observation)
        seen.append((observation, reward, terminated, truncated, info))
        if terminated or truncated:
            _, info = game.reset()
    return seen


class Failing(Objective[Schedule]):
    """Everything but the first state fails."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"
    first = True

    def evaluate(self, states):
        first, self.first = self.first, False
        if first:
            return [Measurement("s", (1.0,), "modelled")]
        return [Measurement("s", (), "modelled", failure="on purpose") for _ in states]


@BOTH
def test_gymnasium_accepts_it(observation: str) -> None:
    env = gymnasium.make(
        ID,
        program=transpose().program,
        objective="model",
        launch=launch(),
        observation=observation,
        render_mode="ansi",
    )
    check_env(env.unwrapped)
    assert "EXIT" in env.unwrapped.render()


@BOTH
def test_it_is_deterministic(observation: str) -> None:
    game = AssemblyGame(**TRANSPOSE, observation=observation)
    for one, other in zip(played(game, 5), played(game, 5), strict=True):
        assert one[1:4] == other[1:4]
        assert one[4]["cost"] == other[4]["cost"]
        first, second = one[0], other[0]
        if observation == "matrix":
            first, second = {"": first}, {"": second}
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_rewards_are_changes_in_per_cent_of_the_original_speed() -> None:
    objective = model(transpose())
    game = AssemblyGame(transpose().program, objective)
    start = objective.evaluate([transpose().start()])[0].value
    _, info = game.reset()
    speed, changes, rng = 1.0, 0, np.random.default_rng(0)
    for _ in range(game.horizon):
        _, reward, _, _, info = game.step(int(rng.choice(np.flatnonzero(info["action_mask"]))))
        now = objective.evaluate([game.game.state])[0].value
        assert info["cost"] == pytest.approx(now, rel=1e-12)
        assert reward == pytest.approx((start / now - speed) * 100, abs=1e-9)
        changes += reward != 0
        speed = start / now
    assert changes > 0 and info["kind"] == "modelled"


def test_the_end_of_the_game_and_the_end_of_time_are_told_apart() -> None:
    game = AssemblyGame(**TRANSPOSE, horizon=3)
    ends = [turn[2:4] for turn in played(game, 0, 6)]
    assert ends == [(False, False), (False, False), (False, True)] * 2
    failing = AssemblyGame(transpose().program, Failing(), horizon=1)
    _, info = failing.reset()
    *_, info = turn = failing.step(int(np.flatnonzero(info["action_mask"])[0]))
    assert turn[1:4] == (-1.0, True, False) and info["failure"] == "on purpose"


def test_illegal_actions_change_nothing_and_the_last_action_gives_up() -> None:
    game = AssemblyGame(**TRANSPOSE)
    before, info = game.reset()
    illegal = np.flatnonzero(~info["action_mask"])
    assert illegal[-1] == game.action_space.n - 1 and len(illegal) > 1
    for action in illegal[:-1]:
        after, reward, terminated, _, _ = game.step(int(action))
        assert np.array_equal(before, after) and reward == 0 and not terminated
    _, reward, terminated, _, _ = game.step(int(illegal[-1]))
    assert terminated and reward == 0


def test_slack_is_never_negative_and_some_is_zero() -> None:
    game = AssemblyGame(**TRANSPOSE, observation="graph")
    for observation, *_ in played(game, 1, 10):
        least, now, slack = observation["edge_values"].T
        assert slack.min() == 0 and np.allclose(now - least, slack)


def test_matrix_rows_follow_the_order() -> None:
    game = AssemblyGame(**TRANSPOSE)
    start, info = game.reset()
    action = int(np.flatnonzero(info["action_mask"])[0])
    after, *_ = game.step(action)
    moved = np.flatnonzero((start != after).any(axis=(0, 2)))
    assert len(moved) == 2 and moved[1] == moved[0] + 1
    assert np.array_equal(start[0, moved], after[0, moved[::-1]])
    table = game.function.instructions
    stalls = [i.control.stall for i in sorted(table, key=lambda i: i.index)]
    assert start[0, :, 9].tolist() == stalls


@BOTH
def test_several_kernels_and_copies_in_one_vector(observation: str) -> None:
    games = [{**game, "observation": observation} for game in (TRANSPOSE, OTHER)]
    with pytest.raises(BadInput, match="at least one"):
        vectorised([])
    envs = vectorised(games, copies=2)
    observations, _ = envs.reset(seed=0)
    assert envs.num_envs == 4
    rng = np.random.default_rng(0)
    own = [AssemblyGame(**game).action_space.n for game in games for _ in range(2)]
    assert envs.single_action_space.n == max(own) > min(own)
    for _ in range(40):
        masks = np.stack(envs.call("action_masks"))
        assert all(not mask[n - 1 :].any() for mask, n in zip(masks, own, strict=True))
        actions = [int(rng.choice(np.flatnonzero(mask))) if mask.any() else 0 for mask in masks]
        observations, rewards, *_ = envs.step(np.array(actions))
        assert np.isfinite(rewards).all()
    assert envs.observation_space.contains(observations)
    envs.close()


def test_a_cubin_is_read_from_its_path() -> None:
    game = AssemblyGame(NVCC / "transpose.sm_90.cubin", model(transpose()))
    assert game.function.name == transpose().function.name


@pytest.mark.parametrize(
    "wrong",
    [
        {"observation": "sound"},
        {"horizon": 0},
        {"objective": "guess"},
        {"objective": "model"},
        {"program": "/no/such.cubin"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(wrong: dict) -> None:
    with pytest.raises(BadInput):
        AssemblyGame(**{**TRANSPOSE, **wrong})
