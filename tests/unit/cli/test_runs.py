"""The commands ``nostall runs`` on run directories in several states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nostall.cli import app
from nostall.core import BadRun, Run

SETTINGS = {"kernel": "k", "original_sha256": "a" * 64, "strategy": "anneal", "seed": 0}
RESULT = {"kind": "modelled", "original": 4e-6, "improved": True, "evaluations": 70}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "my runs"
    for name, best in (("one", 3e-6), ("two", 2e-6)):
        Run.create(folder / name, "nostall tune k.cubin", SETTINGS).finish(
            "done", {**RESULT, "best": best}
        )
    Run.create(folder / "killed", "nostall tune k.cubin", SETTINGS)
    (folder / "bad").mkdir()
    (folder / "bad" / "run.json").write_text("{")
    return folder


def run(*args: object) -> str:
    done = CliRunner().invoke(app, ["runs", *map(str, args)], env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.output


def test_ls(runs: Path) -> None:
    lines = run("ls", runs).splitlines()
    assert lines[0].startswith(f"4 runs in {runs}")
    states = {word for line in lines for word in ("done", "stopped", "unreadable") if word in line}
    assert states == {"done", "stopped", "unreadable"}
    assert any("two" in line and "modelled 2.00x" in line for line in lines)
    listed = json.loads(run("ls", runs, "--format", "json"))
    assert [entry["state"] for entry in listed].count("done") == 2


def test_a_function_is_named_without_the_folders_of_its_file(tmp_path: Path) -> None:
    settings = {"target": "/a/long/folder/model.py:norm", "strategy": "explore"}
    Run.create(tmp_path / "fused", "nostall fuse", settings)
    printed = run("ls", tmp_path)
    assert " model.py:norm" in printed and "long/folder" not in printed


def test_without_a_command_the_runs_of_this_folder_are_listed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert "no runs in runs" in run()
    runs.rename(runs.parent / "runs")
    monkeypatch.chdir(runs.parent)
    assert "4 runs in runs" in run()


def test_show(runs: Path) -> None:
    printed = run("show", runs / "killed")
    assert f"go on:    nostall tune --resume '{runs / 'killed'}'" in printed
    assert json.loads(run("show", runs / "two", "--format", "json"))["ratio"] == 2.0
    with pytest.raises(BadRun, match=r"run\.json"):
        run("show", runs / "bad")


def test_compare(runs: Path) -> None:
    document = json.loads(run("compare", runs / "one", runs / "two", "--format", "json"))
    assert [Path(entry["path"]).name for entry in document["runs"]] == ["two", "one"]
    assert document["remarks"] == []
    assert run("compare", runs / "one", runs / "two").index("two") > 0
    with pytest.raises(BadRun, match="two or more"):
        run("compare", runs / "one")
