"""Training on several kernels: resumed bit for bit, told, and used by a search."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="learning needs the extra nostall[rl]")
pytest.importorskip("torch", reason="learning needs the extra nostall[rl]")
pytest.importorskip("safetensors", reason="learning needs the extra nostall[rl]")

import torch
from nostall.sass.game.learning import Ppo
from tests.unit.sass.game.kernels import NVCC, dot_product, model, transpose

from nostall.cli import train as command
from nostall.core import BadInput, BadRun
from nostall.sass.game.policy import GraphPolicy, load_policy
from nostall.sass.game.randomness import kept_apart
from nostall.sass.game.training import Lesson, Progress, train
from nostall.tuning.corpus import sources
from nostall.tuning.source import Source

TINY = Ppo(steps=6, horizon=4, epochs=1, minibatch=4, width=4, rounds=1)
LESSONS = [
    Lesson("transpose", transpose(), model(transpose())),
    Lesson("dot_product", dot_product(), model(dot_product(), "dot_product")),
]


def trained(rollouts: int, **more) -> GraphPolicy:
    with kept_apart():
        return train(LESSONS, TINY, rollouts, seed=5, **more)


def same(one: GraphPolicy, other: GraphPolicy) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_training_gives_the_same_policy(tmp_path: Path) -> None:
    seen: list[Progress] = []
    whole = trained(3, observe=seen.append)
    assert [progress.rollout for progress in seen] == [1, 2, 3]
    assert set(seen[-1].best) == {"transpose", "dot_product"}
    checkpoint, keep = tmp_path / "checkpoint", tmp_path / "policy"
    first = trained(1, checkpoint=checkpoint, keep=keep)
    assert not same(first, whole) and same(load_policy(keep)[0], first)
    again = trained(3, checkpoint=checkpoint, keep=keep)
    assert same(again, whole)
    policy, header = load_policy(keep)
    assert same(policy, whole) and header["about"]["rollouts"] == 3


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    trained(1, checkpoint=checkpoint)
    with kept_apart(), pytest.raises(BadRun, match="another training"):
        train(LESSONS[:1], TINY, 2, seed=5, checkpoint=checkpoint)
    checkpoint.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(BadRun, match="no checkpoint"):
        trained(2, checkpoint=checkpoint)
    with kept_apart(), pytest.raises(BadInput, match="no kernel"):
        train([], TINY, 1)


def test_a_corpus_is_cubins_with_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def load(path: Path, *rest: object) -> Source:
        loaded.append(path)
        return Source(b"", path.stem, None, str(path), {})

    monkeypatch.setattr("nostall.tuning.corpus.load_cubin", load)
    names = [name for name, _ in sources([str(NVCC)], "sm_90")]
    assert names == ["dot_product.sm_90", "transpose.sm_90"] == [p.stem for p in loaded]
    for wrong in (str(NVCC / "nothing"), str(NVCC.parent)):
        with pytest.raises(BadInput, match="no kernel to learn on"):
            list(sources([wrong], "sm_90"))


def test_the_command_trains_goes_on_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    monkeypatch.setattr("nostall.sass.game.learning.Ppo", lambda: TINY)
    monkeypatch.setattr("nostall.cli.train.sources", lambda corpus, arch: [("transpose", None)])
    monkeypatch.setattr(
        "nostall.cli.train.modelled", lambda _: (LESSONS[0].space, LESSONS[0].objective)
    )
    out = tmp_path / "learned"
    command.train(["x"], out, rollouts=1)
    assert "use it: nostall tune KERNEL --policy" in capsys.readouterr().out
    with pytest.raises(BadRun, match="holds a training already"):
        command.train(["x"], out, rollouts=1)
    command.train(["x"], out, rollouts=2, resume=True)
    assert load_policy(out / "policy.safetensors")[1]["about"]["rollouts"] == 2
    assert list((out / "tensorboard").glob("events.*"))
    with pytest.raises(BadRun, match="holds none yet"):
        command.train(["x"], tmp_path / "other", resume=True)
    for wrong in ({"objective": "gpu"}, {"rollouts": 0}, {"seed": -1}):
        with pytest.raises(BadInput, match="train got"):
            command.train(["x"], tmp_path / "other", **wrong)
