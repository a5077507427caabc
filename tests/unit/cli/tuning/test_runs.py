"""Tests of the run directories of ``nostall tune``: names of new runs, resuming of old runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.sass.robustness.kill_resume import kernel

from nostall.cli.tuning import runs as tune_runs
from nostall.core import BadInput, BadRun, Checkpoint, Run, Tolerance
from nostall.tuning.job import describe
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import load_cubin

CUBIN = Path(__file__).resolve().parents[4] / "examples" / "nvcc" / "transpose.sm_90.cubin"
MEASURED = Settings(evaluations=5, objective="gpu")


def test_runs_of_the_same_second_get_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 21, 19, 30)
    monkeypatch.setattr(tune_runs, "datetime", SimpleNamespace(now=lambda: now))
    folders = [tune_runs.create_run_folder("a::b") for _ in range(3)]
    assert [path.name for path in folders] == [
        f"20261121-193000-a__b{suffix}" for suffix in ("", "-2", "-3")
    ]
    assert all(path.is_dir() for path in folders)


def test_an_unwritable_runs_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadRun, match="--out"):
        tune_runs.create_run_folder("k")


def start(path: Path, **changes: Any) -> Run:
    """Create a run directory; ``changes`` replace settings in its record."""
    settings = describe(kernel(), Settings(evaluations=5))
    return Run.create(path, "tune", {**settings, **changes}, {"original.cubin": kernel().cubin})


def test_a_run_is_resumed_with_its_settings(tmp_path: Path) -> None:
    start(tmp_path / "run")
    resumed = tune_runs.reopen_run(tmp_path / "run", None, None, None)
    assert (resumed.source.cubin, resumed.settings) == (kernel().cubin, Settings(evaluations=5))
    resumed = tune_runs.reopen_run(tmp_path / "run", None, 9, None)
    assert resumed.settings == Settings(evaluations=9)


def checkpoint(evaluations: int, seconds: float) -> Checkpoint:
    memory = {"temperature": 1.0, "seconds": seconds}
    return Checkpoint("anneal", 0, evaluations, 0, "", 1.0, "", 1.0, {}, memory)


def test_limits_of_a_resumed_run_are_more(tmp_path: Path) -> None:
    run = start(tmp_path / "run", seconds=30.0)
    run.on_checkpoint(checkpoint(70, 12.5))

    def limits(seconds: float | None, evaluations: int | None) -> tuple[Any, Any]:
        settings = tune_runs.reopen_run(run.path, seconds, evaluations, None).settings
        return settings.seconds, settings.evaluations

    assert limits(None, None) == (30.0, 5)
    assert limits(10, None) == (22.5, None)
    assert limits(None, 5) == (None, 75)
    assert limits(1, 1) == (13.5, 71)
    workers = tune_runs.reopen_run(run.path, 10, None, 4)  # their searches start anew
    assert workers.settings.seconds == 10


def test_a_done_run_needs_a_limit(tmp_path: Path) -> None:
    run = start(tmp_path / "my run")
    run.finish("done", {})
    with pytest.raises(BadInput, match=r"is done .* give --seconds or .*nostall report '.*my run'"):
        tune_runs.reopen_run(run.path, None, None, None)
    assert tune_runs.reopen_run(run.path, None, 5, None).settings.evaluations == 5


@pytest.fixture
def own_sigint() -> Iterator[None]:
    """Restore the handler of Ctrl-C: processes that later tests start would ignore it, too."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("own_sigint")
def test_an_interrupt_names_what_is_kept(tmp_path: Path) -> None:
    run = start(tmp_path / "my run")
    assert "nothing is kept" in str(tune_runs.kept_after_interrupt(run))
    run.on_checkpoint(checkpoint(2363, 12.5))
    message = str(tune_runs.kept_after_interrupt(run))
    assert "keeps 2363 evaluations" in message
    assert f"`nostall tune --resume '{run.path}'`" in message
    run.finish("interrupted", {"verdict": "safe"})
    message = str(tune_runs.kept_after_interrupt(run))
    assert "keeps the result" in message and f"`nostall report '{run.path}'`" in message


@pytest.mark.parametrize(
    "settings",
    [
        MEASURED,
        replace(
            MEASURED,
            checks=1000,
            clock="events",
            cold=True,
            tolerance=Tolerance(rtol=1e-3, atol=1e-6),
            sanitizer=True,
        ),
    ],
)
def test_a_resumed_run_measures_in_the_same_way(tmp_path: Path, settings: Settings) -> None:
    source = load_cubin(CUBIN)
    files = {"original.cubin": source.cubin}
    with Run.create(tmp_path / "run", "nostall tune", describe(source, settings), files):
        pass
    resumed = tune_runs.reopen_run(tmp_path / "run", None, None, None)
    assert resumed.settings == settings and resumed.source.cubin == source.cubin
    plan = resumed.settings.measurement_plan
    assert plan == settings.measurement_plan
    assert (plan.clock, plan.tolerance) == (settings.clock, settings.tolerance)


def test_a_run_with_another_original_is_not_resumed(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.write("original.cubin", kernel().cubin + b"\0")
    with pytest.raises(BadInput, match="not the file that the run started with"):
        tune_runs.reopen_run(tmp_path / "run", None, None, None)


@pytest.mark.parametrize(
    "changes", [{"seed": "x"}, {"seed": None}, {"evaluations": "many"}, {"provenance": 3}]
)
def test_a_run_with_invalid_settings_is_not_resumed(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    start(tmp_path / "run", **changes)
    with pytest.raises(BadInput, match="cannot be resumed"):
        tune_runs.reopen_run(tmp_path / "run", None, None, None)


@pytest.mark.parametrize("limits", [(0.0, None), (None, 0)])
def test_a_limit_of_zero_is_an_error(tmp_path: Path, limits: tuple[Any, Any]) -> None:
    start(tmp_path / "run")
    with pytest.raises(BadInput, match="greater than 0"):
        tune_runs.reopen_run(tmp_path / "run", *limits, None)
