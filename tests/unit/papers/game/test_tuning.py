"""Tuning with a learning strategy, without the extra, and with verified checkpoints."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import nostall.papers  # noqa: F401  registers cuasmrl and ppo
from nostall.core import BadInput, ContractBroken, MissingPart, Run
from nostall.core.search import Checkpoint
from nostall.sass.schedule import ScheduleSpace
from nostall.tuning.job import CheckpointVerifier, describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import load_cubin
from nostall.tuning.strategies import LOG_FOLDER, make_strategy
from tests.unit.papers.game.kernels import NVCC, launch, transpose


def checkpoint(space: ScheduleSpace, seed: int) -> Checkpoint:
    """A checkpoint whose best schedule depends on the seed."""
    import numpy as np

    state, rng = space.start(), np.random.default_rng(seed)
    for _ in range(4):
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    text = space.dump(state)
    return Checkpoint("cuasmrl", 0, 5, 0, text, 1.0, text, 1.0, {}, {})


def test_a_checkpoint_is_verified_once_and_a_rejection_ends_the_search() -> None:
    verified: list[bytes] = []
    space = transpose()
    observer = CheckpointVerifier(space, verified.append)
    start = dataclasses.replace(checkpoint(space, 1), best=space.dump(space.start()))
    observer.on_checkpoint(start)
    assert verified == []
    for _ in range(2):
        observer.on_checkpoint(checkpoint(space, 1))
    assert verified == [space.impose(space.load(checkpoint(space, 1).best)).to_cubin()]

    def reject(candidate: bytes) -> None:
        raise ContractBroken("rejected")

    with pytest.raises(ContractBroken):
        CheckpointVerifier(space, reject).on_checkpoint(checkpoint(space, 2))


def test_a_run_with_cuasmrl(tmp_path: Path) -> None:
    pytest.importorskip("sb3_contrib", reason="CuAsmRL needs the extra nostall[rl]")
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    source = load_cubin(NVCC / "transpose.sm_90.cubin", None, launch())
    settings = Settings("cuasmrl", evaluations=40)
    small = dataclasses.replace(
        make_strategy("cuasmrl", logs=tmp_path / LOG_FOLDER), features=8, steps=8, epochs=1
    )
    with Run.create(tmp_path / "run", "test", describe(source, settings)) as run:
        tuned = tune(source, small, settings, run=run)
    assert tuned.verdict.safe and tuned.search.evaluations == 40
    assert tuned.search.stopped == "budget"
    assert len(list(Run.open(tmp_path / "run").trials())) == 40
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "done"
    assert list((tmp_path / LOG_FOLDER).rglob("events.*"))


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("nostall.papers.game")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingPart, match=r"pip install 'nostall\[rl\]'"):
        make_strategy("cuasmrl")


def test_an_unknown_strategy_is_rejected_with_the_known_names() -> None:
    with pytest.raises(BadInput, match="anneal, assembler, cuasmrl, ppo, random, sip"):
        make_strategy("dreaming")
    assert make_strategy("sip").name == "sip"
    with pytest.raises(BadInput, match="cannot use a policy file"):
        make_strategy("anneal", policy=Path("x"))
