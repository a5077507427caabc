"""``nostall tune``: how it is to be measured is read, refused, kept and taken up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.cli import tune as command
from nostall.core import BadInput, MissingPart, Run, Tolerance
from nostall.gpu import sanitizer
from nostall.tuning.job import Settings, describe
from nostall.tuning.source import load_cubin

CUBIN = Path(__file__).resolve().parents[3] / "examples" / "nvcc" / "transpose.sm_90.cubin"
GPU = Settings(evaluations=5, objective="gpu")
MODEL = Settings(evaluations=5)


@pytest.mark.parametrize(
    "settings",
    [
        replace(MODEL, tolerance=Tolerance(rtol=1e-3)),
        replace(MODEL, clock="cupti"),
        replace(MODEL, cold=True),
        replace(MODEL, sanitizer=True),
    ],
)
def test_a_model_measures_nothing(settings: Settings) -> None:
    with pytest.raises(BadInput, match="give --objective gpu as well"):
        command._check(settings, None)


def test_the_sanitizer_is_looked_for_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> str:
        raise MissingPart("compute-sanitizer is not on the PATH")

    monkeypatch.setattr(sanitizer, "find", missing)
    command._check(GPU, None)
    with pytest.raises(MissingPart):
        command._check(replace(GPU, sanitizer=True), None)


@pytest.mark.parametrize(
    "settings",
    [
        GPU,
        replace(
            GPU,
            checks=1000,
            clock="events",
            cold=True,
            tolerance=Tolerance(rtol=1e-3, atol=1e-6),
            sanitizer=True,
        ),
    ],
)
def test_a_resumed_run_measures_as_before(tmp_path: Path, settings: Settings) -> None:
    source = load_cubin(CUBIN)
    files = {"original.cubin": source.cubin}
    with Run.create(tmp_path / "run", "nostall tune", describe(source, settings), files):
        pass
    _, again, found = command._reopen(tmp_path / "run", None, None, None)
    assert found == settings and again.cubin == source.cubin
    assert found.plan == settings.plan
    assert (found.plan.clock, found.plan.tolerance) == (settings.clock, settings.tolerance)
