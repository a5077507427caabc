"""Run directories of ``nostall tune``: made for one process, resumed as they were begun."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.sass.kill_resume import kernel

from nostall.cli import tune as command
from nostall.core import BadInput, BadRun, Run
from nostall.tuning.job import Settings, describe


def test_two_of_one_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 21, 19, 30)
    monkeypatch.setattr(command, "datetime", SimpleNamespace(now=lambda: now))
    made = [command._fresh("a::b") for _ in range(3)]
    assert [path.name for path in made] == [
        f"20261121-193000-a__b{end}" for end in ("", "-2", "-3")
    ]
    assert all(path.is_dir() for path in made)


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadRun, match="--out"):
        command._fresh("k")


def _begun(path: Path, **changes: Any) -> Run:
    settings = describe(kernel(), Settings(evaluations=5))
    return Run.create(path, "tune", {**settings, **changes}, {"original.cubin": kernel().cubin})


def test_a_run_is_resumed_with_its_own_settings(tmp_path: Path) -> None:
    _begun(tmp_path / "run")
    _, source, settings = command._reopen(tmp_path / "run", None, None, None)
    assert (source.cubin, settings) == (kernel().cubin, Settings(evaluations=5))
    _, _, settings = command._reopen(tmp_path / "run", None, 9, None)
    assert settings == Settings(evaluations=9)


def test_a_run_is_not_resumed_with_another_kernel(tmp_path: Path) -> None:
    run = _begun(tmp_path / "run")
    run.write("original.cubin", kernel().cubin + b"\0")
    with pytest.raises(BadInput, match="not the file that the run began with"):
        command._reopen(tmp_path / "run", None, None, None)


@pytest.mark.parametrize(
    "changes", [{"seed": "x"}, {"seed": None}, {"evaluations": "many"}, {"provenance": 3}]
)
def test_settings_that_are_none_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    _begun(tmp_path / "run", **changes)
    with pytest.raises(BadInput, match="cannot be resumed"):
        command._reopen(tmp_path / "run", None, None, None)


@pytest.mark.parametrize("limits", [(0.0, None), (None, 0)])
def test_a_limit_of_nothing_is_refused(tmp_path: Path, limits: tuple[Any, Any]) -> None:
    _begun(tmp_path / "run")
    with pytest.raises(BadInput, match="greater than 0"):
        command._reopen(tmp_path / "run", *limits, None)
