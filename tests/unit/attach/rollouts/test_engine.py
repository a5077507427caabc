"""Tests of the process of an engine, with processes that do not need vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic

import pytest

from nostall.attach.rollouts.engine import Engine
from nostall.attach.rollouts.job import CHILD, Settings, started

PROGRAM = """
import json, os, sys, time
from nostall.core.process import Channel, ProcessEnded
mode, folder, channel = sys.argv[1], sys.argv[3], Channel.from_descriptor(int(sys.argv[-1]))
print("starting in", mode, flush=True)
if mode == "ends":
    sys.exit(7)
if mode == "hangs":
    time.sleep(60)
channel.send({"own": [name for name in os.environ if name.startswith("NOSTALL_VLLM")]})
while True:
    try:
        command = channel.receive()
    except ProcessEnded:
        break
    if command["do"] == "end":
        sys.exit(9)
    if command["do"] == "wait":
        time.sleep(60)
    channel.send(command)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fake_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    return tmp_path


def test_an_engine_answers_and_does_not_inherit_the_plug_ins_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_VLLM", "1")
    monkeypatch.setenv("NOSTALL_VLLM_ATTENTION", "all")
    engine = Engine("a", folder / "a", ["fake_child", "works"], {"NOSTALL_VLLM_LINEAR": "t"})
    engine.connect(monotonic() + 30)
    assert engine.problem == ""
    assert engine.record["own"] == ["NOSTALL_VLLM_LINEAR"]
    assert engine.ask({"do": "echo"}) == {"do": "echo"}
    assert engine.ask({"do": "end"}) is None
    assert engine.problem == "the process ended with exit code 9; starting in works"
    assert engine.ask({"do": "echo"}) is None
    engine.end()


@pytest.mark.parametrize(
    ("mode", "problem"),
    [("ends", "the process ended with exit code 7; starting in ends"),
     ("hangs", "no answer within")],
)  # fmt: skip
def test_an_engine_that_does_not_start_has_a_problem(mode: str, problem: str, folder: Path) -> None:
    engine = Engine("a", folder / "a", ["fake_child", mode], {})
    engine.connect(monotonic() + (30 if mode == "ends" else 0))
    assert problem in engine.problem
    assert engine.ask({"do": "echo"}) is None


def test_an_answer_that_is_late_ends_the_engine(folder: Path) -> None:
    engine = Engine("a", folder / "a", ["fake_child", "works"], {})
    engine.connect(monotonic() + 30)
    assert engine.ask({"do": "wait"}, 0.2) is None
    assert engine.problem.startswith("no answer within 0.2 s")


def test_engines_of_a_session_have_the_model_and_end_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nostall.attach.rollouts.job.CHILD", "fake_child")
    assert CHILD == "nostall.attach.rollouts.child"
    with started(["FLASH_ATTN", "CUSTOM"], Settings("{}", 1.0, 64), 0.0) as engines:
        assert [engine.name for engine in engines] == ["FLASH_ATTN", "CUSTOM"]
        models = [engine._log.parent / "model" / "config.json" for engine in engines]
        assert [model.read_text() for model in models] == ["{}", "{}"]
    assert not any(model.exists() for model in models)
    assert all(engine._process.is_alive is False for engine in engines)
