"""Training on several kernels: resumed bit for bit, reported, and used by ``nostall train``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="learning needs the extra nostall[rl]")
pytest.importorskip("torch", reason="learning needs the extra nostall[rl]")
pytest.importorskip("safetensors", reason="learning needs the extra nostall[rl]")

import torch

from nostall.cli.tuning import train as command
from nostall.core import BadInput, BadRun
from nostall.papers.game.ppo.learner import GraphPpoParameters, Progress, TrainingKernel, train
from nostall.papers.game.ppo.policy import GraphPolicy, load_policy
from nostall.papers.game.randomness import isolated_random_state
from nostall.tuning.sources.corpus import load_corpus
from nostall.tuning.sources.source import Source
from tests.unit.papers.game.kernels import NVCC, dot_product, model, transpose

TINY = GraphPpoParameters(steps=6, horizon=4, epochs=1, minibatch=4, width=4, rounds=1)
KERNELS = [
    TrainingKernel("transpose", transpose(), model(transpose())),
    TrainingKernel("dot_product", dot_product(), model(dot_product(), "dot_product")),
]


def trained(rollouts: int, **more) -> GraphPolicy:
    with isolated_random_state():
        return train(KERNELS, TINY, rollouts, seed=5, **more)


def same(first: GraphPolicy, second: GraphPolicy) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_training_gives_the_same_policy(tmp_path: Path) -> None:
    reports: list[Progress] = []
    uninterrupted = trained(3, observe=reports.append)
    assert [progress.rollout for progress in reports] == [1, 2, 3]
    assert set(reports[-1].best) == {"transpose", "dot_product"}
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "policy"
    first = trained(1, checkpoint=checkpoint, policy_path=path)
    assert not same(first, uninterrupted) and same(load_policy(path)[0], first)
    resumed = trained(3, checkpoint=checkpoint, policy_path=path)
    assert same(resumed, uninterrupted)
    policy, header = load_policy(path)
    assert same(policy, uninterrupted) and header["about"]["rollouts"] == 3


def test_a_checkpoint_of_another_training_is_rejected(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    trained(1, checkpoint=checkpoint)
    with isolated_random_state(), pytest.raises(BadRun, match="another training"):
        train(KERNELS[:1], TINY, 2, seed=5, checkpoint=checkpoint)
    checkpoint.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(BadRun, match="no checkpoint"):
        trained(2, checkpoint=checkpoint)
    with isolated_random_state(), pytest.raises(BadInput, match="no kernel"):
        train([], TINY, 1)


def test_a_corpus_holds_cubins_with_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []

    def load(path: Path, *rest: object) -> Source:
        loaded.append(path)
        return Source(path.read_bytes(), path.stem, None, str(path), {})

    monkeypatch.setattr("nostall.tuning.sources.corpus.load_cubin", load)
    names = [name for name, _ in load_corpus([str(NVCC)], "sm_90")]
    assert names == ["dot_product.sm_90", "transpose.sm_90"] == [p.stem for p in loaded]
    for wrong in (str(NVCC / "nothing"), str(NVCC.parent)):
        with pytest.raises(BadInput, match="holds no kernel"):
            list(load_corpus([wrong], "sm_90"))


def test_the_command_trains_resumes_and_rejects_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="the curves need the extra nostall[rl]")
    monkeypatch.setattr("nostall.papers.game.ppo.learner.GraphPpoParameters", lambda: TINY)
    monkeypatch.setattr(
        "nostall.tuning.sources.corpus.load_corpus", lambda corpus, arch: [("transpose", None)]
    )
    monkeypatch.setattr(
        "nostall.tuning.sources.corpus.modelled_problem",
        lambda _: (KERNELS[0].space, KERNELS[0].objective),
    )
    out = tmp_path / "learned"
    command.train(["x"], out, rollouts=1)
    assert "use it: nostall tune KERNEL --policy" in capsys.readouterr().out
    with pytest.raises(BadRun, match="holds a training already"):
        command.train(["x"], out, rollouts=1)
    command.train(["x"], out, rollouts=2, resume=True)
    assert load_policy(out / "policy.safetensors")[1]["about"]["rollouts"] == 2
    assert list((out / "tensorboard").glob("events.*"))
    with pytest.raises(BadRun, match="holds no training yet"):
        command.train(["x"], tmp_path / "other", resume=True)
    for wrong in ({"objective": "gpu"}, {"rollouts": 0}, {"seed": -1}):
        with pytest.raises(BadInput, match=f"--{next(iter(wrong))}"):
            command.train(["x"], tmp_path / "other", **wrong)
