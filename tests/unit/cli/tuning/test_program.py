"""``nostall tune app.py``: from the program's launches to a table of its kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nostall.cli import main
from nostall.cli.terminal.console import Format
from nostall.cli.tuning import program as command
from nostall.cli.tuning.program import ProgramInput, tune_program
from nostall.core import BadInput, LaunchSpec
from nostall.core.errors import MissingPart
from nostall.tuning import program as job
from nostall.tuning.launches.recorded import RecordedLaunch
from nostall.tuning.program import ProgramKernel, Start
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

LINE = {"kernel": "k", "file": "app.py", "grid": [1, 1, 1], "args": []}
SETTINGS = Settings("anneal", seconds=60.0, objective="model")


def make_kernel(name: str, launches: int, us: float = 1.0) -> ProgramKernel:
    launch = RecordedLaunch(name, "app.py", launches, {}, ())
    own = Start(Source(name.encode(), name, None, f"app.py:{name}", {}), us * 1e-6, None)
    return ProgramKernel(own, launch, launches, launches * own.seconds, "mma")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A program with two kernels; the list has the commands that ran and what was searched."""
    calls: list[Any] = []

    def run(words: list[str], log: Path) -> int:
        calls.append(words)
        log.write_text(json.dumps(LINE))
        return 3

    def load(launches: Any, arch: str, time: Any) -> Any:
        assert [launch.kernel for launch in launches] == ["k"] and arch == "sm_90"
        kernels = [make_kernel("rare", 1), make_kernel("often", 3)]
        return kernels, [("odd", "x is a tuple")]

    monkeypatch.setattr("nostall.cli.record.run_recorded", run)
    monkeypatch.setattr(job, "load_kernels", load)
    yield calls


def tune(calls: list[Any], stopped: str = "budget", **fields: Any) -> None:
    def tune_one(source: Source, settings: Settings, folder: Path | None) -> Any:
        calls.append((source.kernel, settings.seconds, folder))
        result: Any = SimpleNamespace(ratio=1.25, search=SimpleNamespace(stopped=stopped))
        return result, folder or Path("runs/x")

    given = {"arch": None, "folder": None, "format": Format.TABLE, "quiet": False, **fields}
    tune_program(ProgramInput(("app.py", "-n", "2"), **given), SETTINGS, tune_one)


def test_a_program_is_run_and_its_kernels_share_the_seconds(
    program: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(program, folder=Path("out"))
    assert program[0] == [sys.executable, "app.py", "-n", "2"]
    assert program[1:] == [
        ("often", pytest.approx(45.0), Path("out/01-often")),
        ("rare", pytest.approx(15.0), Path("out/02-rare")),
    ]
    shown = capsys.readouterr()
    assert "all launches: 1.2500x (modelled" in shown.out and "75.0%" in shown.out
    assert "app.py -n 2 ended with code 3" in shown.err
    assert "not tuned: odd: x is a tuple" in shown.err and "use it" not in shown.out


def test_ctrl_c_ends_the_searches_and_prints_what_was_found(
    program: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(program, stopped="interrupted", format=Format.JSON)
    document = json.loads(capsys.readouterr().out)
    assert document["interrupted"] and len(program) == 2 and document["runs"] == ["runs/x"]
    assert [kernel["ratio"] for kernel in document["kernels"]] == [1.25, 1.0]
    assert document["ratio"] == pytest.approx(1 / (0.75 / 1.25 + 0.25))
    assert document["program"] == "app.py -n 2"


def test_a_program_without_kernels_says_why(
    program: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "load_kernels", lambda *_: ([], [("odd", "x is a tuple")]))
    with pytest.raises(BadInput, match=r"no kernel that can be tuned \(odd: x is a tuple\)"):
        tune(program)


def test_a_launch_needs_a_gpu_or_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_kernel("k", 1).own.source
    with pytest.raises(BadInput, match="its time needs the launch"):
        command._launch_seconds(source, SETTINGS)

    def refuse(*_: Any) -> None:
        raise MissingPart("no usable GPU")

    monkeypatch.setattr(command, "LocalGpu", refuse)
    measured = Settings("assembler", seconds=1.0, objective="gpu")
    launched = Source(b"", "k", LaunchSpec(), "app.py:k", {})
    with pytest.raises(MissingPart):
        command._launch_seconds(launched, measured)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["app.py", "--kernel", "k"], "--kernel is for one kernel, and the target is a program"),
        (["app.py", "--objective", "recorded"], "--objective gpu or model"),
        (["app.py", "--evaluations", "9", "--objective", "model"], "--seconds as the budget"),
        (["app.py:k", "--", "-n"], "arguments are for a program"),
    ],
)
def test_options_that_a_program_cannot_have(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["nostall", "tune", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capfd.readouterr().err
