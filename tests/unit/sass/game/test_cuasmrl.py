"""CuAsmRL as a search: the contract, the published numbers, and that it learns."""

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
from tests.unit.sass.game.kernels import model, transpose

from nostall.core import BadInput, Budget
from nostall.sass.game.cuasmrl import Cuasmrl
from nostall.search.episodes import read_episodes
from nostall.testing import Disorder, Permutations, check_search

SMALL = Cuasmrl(iterations=6, steps=4, minibatch=4, horizon=5, epochs=1, features=8)


def test_it_keeps_the_contract_of_a_search() -> None:
    check_search(SMALL, transpose(), model(transpose()), seed=3, evaluations=9)


def test_it_is_finished_after_the_published_number_of_turns() -> None:
    found = SMALL.run(transpose(), model(transpose()), Budget(evaluations=1000), seed=1)
    assert found.stopped == "finished" and found.evaluations == 1 + 6 * 4


def test_the_published_parameters() -> None:
    whole = Cuasmrl()
    assert (whole.iterations, whole.steps, whole.horizon) == (200, 64, 32)
    assert whole.iterations * whole.steps == 12_800


def test_episodes_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    found = dataclasses.replace(SMALL, logs=tmp_path).run(
        transpose(), model(transpose()), Budget(evaluations=1000), seed=1
    )
    kept = read_episodes(tmp_path)
    # 24 turns in episodes of 5, in rollouts of 4.
    assert [(e.rollout, e.evaluations, e.turns) for e in kept] == [
        (1, 6, 5), (2, 11, 5), (3, 16, 5), (4, 21, 5)
    ]  # fmt: skip
    assert found.evaluations == 25 and any(e.earned != 0 for e in kept)


def test_other_generators_stay_as_they_were() -> None:
    before = (random.random, random.getstate(), np.random.get_state()[1].tolist())
    torch_before = torch.random.get_rng_state()
    SMALL.run(transpose(), model(transpose()), Budget(evaluations=20), seed=1)
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert torch.equal(torch.random.get_rng_state(), torch_before)


def test_only_schedules_and_sensible_numbers() -> None:
    with pytest.raises(BadInput, match="not on Permutations"):
        SMALL.run(Permutations(), Disorder(), Budget(evaluations=5))
    for wrong in ({"minibatch": 7}, {"iterations": 0}, {"clip": 0.0}, {"entropy": -1.0}):
        with pytest.raises(BadInput, match="cuasmrl got"):
            Cuasmrl(**wrong)
