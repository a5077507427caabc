"""Tests of the checks of the options of ``nostall tune`` before a search."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from nostall.cli import main
from nostall.cli.tuning import tune as command
from nostall.core import BadInput, MissingPart, Tolerance
from nostall.gpu import sanitizer
from nostall.tuning.settings import Settings

MEASURED = Settings(evaluations=5, objective="gpu")
MODELLED = Settings(evaluations=5)


@pytest.mark.parametrize(
    "settings",
    [
        replace(MODELLED, tolerance=Tolerance(rtol=1e-3)),
        replace(MODELLED, clock="cupti"),
        replace(MODELLED, cold=True),
        replace(MODELLED, sanitizer=True),
    ],
)
def test_measuring_options_need_a_measured_objective(settings: Settings) -> None:
    with pytest.raises(BadInput, match="give --objective gpu as well"):
        command.check_settings(settings, None)


def test_measured_latencies_need_a_search_of_native_instructions() -> None:
    settings = replace(MODELLED, strategy="assembler", objective="gpu", measured_latencies=True)
    with pytest.raises(BadInput, match="give --strategy anneal as well"):
        command.check_settings(settings, None)
    command.check_settings(replace(MODELLED, measured_latencies=True), None)


def test_a_missing_sanitizer_is_reported_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_missing() -> str:
        raise MissingPart("compute-sanitizer is not on the PATH")

    monkeypatch.setattr(sanitizer, "find", raise_missing)
    command.check_settings(MEASURED, None)
    with pytest.raises(MissingPart):
        command.check_settings(replace(MEASURED, sanitizer=True), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2"], "--objective gpu"),
        (["--scheduler", "tcp://127.0.0.1:9"], "--objective gpu"),
        (["--workers", "0", "--objective", "gpu"], "1 or more"),
    ],
)
def test_workers_require_a_measured_objective(
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["nostall", "tune", "/nothing.cubin", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and message in capfd.readouterr().err
