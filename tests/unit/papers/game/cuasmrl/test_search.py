"""Strategy ``cuasmrl``: the contract of a search, the published parameters, the episode log."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="CuAsmRL needs the extra nostall[rl]")
pytest.importorskip("torch", reason="CuAsmRL needs the extra nostall[rl]")
pytest.importorskip("sb3_contrib", reason="CuAsmRL needs the extra nostall[rl]")

import torch

from nostall.core import BadInput, Budget
from nostall.papers.game.cuasmrl.search import Cuasmrl
from nostall.search.episodes import read_episodes
from nostall.testing import Disorder, Permutations, check_search
from tests.unit.papers.game.kernels import model, transpose

SMALL = Cuasmrl(iterations=6, steps=4, minibatch=4, horizon=5, epochs=1, features=8)


def test_it_meets_the_contract_of_a_search() -> None:
    check_search(SMALL, transpose(), model(transpose()), seed=3, evaluations=9)


def test_it_is_finished_after_all_rollouts() -> None:
    result = SMALL.run(transpose(), model(transpose()), Budget(evaluations=1000), seed=1)
    assert result.stopped == "finished" and result.evaluations == 1 + 6 * 4


def test_the_published_parameters() -> None:
    published = Cuasmrl()
    assert (published.iterations, published.steps, published.horizon) == (200, 64, 32)
    assert published.iterations * published.steps == 12_800


def test_episodes_are_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    result = dataclasses.replace(SMALL, logs=tmp_path).run(
        transpose(), model(transpose()), Budget(evaluations=1000), seed=1
    )
    episodes = read_episodes(tmp_path)
    # 24 steps in episodes of 5, in rollouts of 4.
    assert [(e.rollout, e.evaluations, e.steps) for e in episodes] == [
        (1, 6, 5), (2, 11, 5), (3, 16, 5), (4, 21, 5)
    ]  # fmt: skip
    assert result.evaluations == 25 and any(e.total_reward != 0 for e in episodes)


def test_global_generators_do_not_change() -> None:
    before = (random.random, random.getstate(), np.random.get_state()[1].tolist())
    torch_before = torch.random.get_rng_state()
    SMALL.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1)
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert torch.equal(torch.random.get_rng_state(), torch_before)


def test_other_spaces_and_invalid_parameters_are_rejected() -> None:
    with pytest.raises(BadInput, match="not on Permutations"):
        SMALL.run(Permutations(), Disorder(), Budget(evaluations=5))
    for wrong in ({"minibatch": 7}, {"iterations": 0}, {"clip": 0.0}, {"entropy": -1.0}):
        with pytest.raises(BadInput, match="cuasmrl got"):
            Cuasmrl(**wrong)
