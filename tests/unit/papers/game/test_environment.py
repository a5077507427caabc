"""The environment meets Gymnasium's contract, and its rewards follow the objective."""

from __future__ import annotations

import sys
from typing import ClassVar

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the game needs the extra nostall[rl]")

import gymnasium
from gymnasium.utils.env_checker import check_env

import nostall.papers
from nostall.core import BadInput, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.papers.game import ID, AssemblyGame, make_vector_env
from nostall.sass.schedule import Schedule
from tests.unit.papers.game.kernels import CORPUS, NVCC, largest, launch, model, transpose

BOTH = pytest.mark.parametrize("observation", ["matrix", "graph"])
TRANSPOSE = {"program": transpose().program, "objective": model(transpose())}
LARGER = largest(CORPUS / "memory.sm_75.cubin")
OTHER = {
    "program": LARGER.program,
    "objective": model(LARGER),
    "kernel": LARGER.function.name,
}


def random_steps(game: AssemblyGame, seed: int, count: int = 40) -> list[tuple]:
    """Results of random legal steps; a new episode begins when one ends."""
    rng, steps = np.random.default_rng(seed), []
    _, info = game.reset(seed=seed)
    for _ in range(count):
        action = int(rng.choice(np.flatnonzero(info["action_mask"])))
        observation, reward, terminated, truncated, info = game.step(action)
        assert game.observation_space.contains(observation)
        steps.append((observation, reward, terminated, truncated, info))
        if terminated or truncated:
            _, info = game.reset()
    return steps


class Failing(Objective[Schedule]):
    """All states but the first fail."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"
    first = True

    def evaluate(self, states):
        first, self.first = self.first, False
        if first:
            return [Measurement("s", (1.0,), "modelled")]
        return [Measurement("s", (), "modelled", failure="on purpose") for _ in states]


@BOTH
def test_it_passes_the_environment_checker(observation: str) -> None:
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


def test_gymnasium_finds_the_game_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gymnasium.registry, ID)
    # The package of this name in its parent is replaced by the import, and put back afterwards.
    monkeypatch.setattr(nostall.papers, "game", sys.modules["nostall.papers.game"])
    monkeypatch.delitem(sys.modules, "nostall.papers.game")
    env = gymnasium.make(
        "nostall.papers.game:nostall/AssemblyGame-v0",
        program=str(NVCC / "transpose.sm_90.cubin"),
        objective="model",
        launch=launch(),
    )
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert info["action_mask"].any()


@BOTH
def test_it_is_deterministic(observation: str) -> None:
    game = AssemblyGame(**TRANSPOSE, observation=observation)
    for a, b in zip(random_steps(game, 5), random_steps(game, 5), strict=True):
        assert a[1:4] == b[1:4]
        assert a[4]["cost"] == b[4]["cost"]
        first, second = a[0], b[0]
        if observation == "matrix":
            first, second = {"": first}, {"": second}
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_rewards_are_changes_in_per_cent_of_the_original_throughput() -> None:
    objective = model(transpose())
    game = AssemblyGame(transpose().program, objective)
    start = objective.evaluate([transpose().start()])[0].value
    _, info = game.reset()
    speedup, changes, rng = 1.0, 0, np.random.default_rng(0)
    for _ in range(game.horizon):
        _, reward, _, _, info = game.step(int(rng.choice(np.flatnonzero(info["action_mask"]))))
        now = objective.evaluate([game.game.state])[0].value
        assert info["cost"] == pytest.approx(now, rel=1e-12)
        assert reward == pytest.approx((start / now - speedup) * 100, abs=1e-9)
        changes += reward != 0
        speedup = start / now
    assert changes > 0 and info["kind"] == "modelled"


def test_termination_and_truncation_are_distinguished() -> None:
    game = AssemblyGame(**TRANSPOSE, horizon=3)
    ends = [step[2:4] for step in random_steps(game, 0, 6)]
    assert ends == [(False, False), (False, False), (False, True)] * 2
    failing = AssemblyGame(transpose().program, Failing(), horizon=1)
    _, info = failing.reset()
    *_, info = step = failing.step(int(np.flatnonzero(info["action_mask"])[0]))
    assert step[1:4] == (-1.0, True, False) and info["failure"] == "on purpose"


def test_illegal_actions_change_nothing_and_the_last_action_ends_the_episode() -> None:
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
    for observation, *_ in random_steps(game, 1, 10):
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
    instructions = game.function.instructions
    stalls = [i.control.stall for i in sorted(instructions, key=lambda i: i.index)]
    assert start[0, :, 9].tolist() == stalls


@BOTH
def test_several_kernels_and_copies_in_one_vector(observation: str) -> None:
    games = [{**game, "observation": observation} for game in (TRANSPOSE, OTHER)]
    with pytest.raises(BadInput, match="at least one"):
        make_vector_env([])
    envs = make_vector_env(games, copies=2)
    observations, _ = envs.reset(seed=0)
    assert envs.num_envs == 4
    rng = np.random.default_rng(0)
    counts = [AssemblyGame(**game).action_space.n for game in games for _ in range(2)]
    assert envs.single_action_space.n == max(counts) > min(counts)
    for _ in range(40):
        masks = np.stack(envs.call("action_masks"))
        assert all(not mask[n - 1 :].any() for mask, n in zip(masks, counts, strict=True))
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
def test_invalid_arguments_are_rejected(wrong: dict) -> None:
    with pytest.raises(BadInput):
        AssemblyGame(**{**TRANSPOSE, **wrong})
