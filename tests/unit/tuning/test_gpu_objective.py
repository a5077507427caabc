"""The main job on a device: what is kept, and what is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.core import LaunchSpec, Run, Tolerance
from nostall.gpu import Outcome, Timing
from nostall.gpu.sanitizer import SanitizerReport
from nostall.search import Anneal
from nostall.store import Store
from nostall.tuning import job
from nostall.tuning.job import Settings, TuningResult, tune
from nostall.tuning.source import Source, load_cubin
from nostall.tuning.store_records import record

NVCC = Path(__file__).resolve().parents[3] / "examples" / "nvcc"
SETTINGS = Settings(evaluations=12, objective="gpu", rounds=8, checks=2)


class Pretended:
    """Every candidate takes ``during`` of the original's time in the search, ``after`` of it in the
    end; some fault, always the same ones."""

    info: Mapping[str, str] = {"gpu": "none"}

    def __init__(self, during: float, after: float, original: bytes) -> None:
        self.during, self.after, self.original = during, after, original

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == self.original:
            return Outcome("timed", Timing((1e-5,) * 3, (1e-5,) * 3))
        if sum(cubin) % 4 == 0:
            return Outcome("fault", detail="CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 * self.during,) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        if self.after < 0:
            return Outcome("wrong", detail="3 words of the outputs differ")
        one = (1e-5,) * rounds
        return Outcome("timed", Timing(one, (1e-5 * self.after,) * rounds, one))


def _source() -> Source:
    launch = LaunchSpec.from_toml(NVCC / "dot_product.toml")
    return load_cubin(NVCC / "dot_product.sm_90.cubin", None, launch)


def _tuned(
    during: float, after: float, settings: Settings = SETTINGS, run: Run | None = None
) -> tuple[TuningResult, bytes]:
    source = _source()
    device = Pretended(during, after, source.cubin)
    return tune(source, Anneal(), settings, run=run, device=device), source.cubin


def test_a_gain_that_a_fresh_process_confirms_is_kept() -> None:
    tuned, original = _tuned(during=0.9, after=0.8)
    assert tuned.improved
    assert tuned.cubin != original
    assert tuned.ratio == pytest.approx(1.25)
    assert tuned.search.best_measurement.kind == "measured"


@pytest.mark.parametrize("after", [1.0, 1.2, -1.0])
def test_a_gain_that_does_not_last_leaves_the_original(after: float) -> None:
    tuned, original = _tuned(during=0.9, after=after)
    assert not tuned.improved
    assert tuned.cubin == original
    assert tuned.ratio == 1.0


def test_the_original_is_no_gain_over_itself() -> None:
    tuned, original = _tuned(during=1.1, after=0.8)
    assert not tuned.improved or tuned.cubin != original


def test_how_outputs_were_compared_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        "memcheck": SanitizerReport("clean"),
        "racecheck": SanitizerReport("did not run", "why"),
    }
    monkeypatch.setattr(job, "sanitize", lambda kernel, cubin, plan: reports)
    settings = replace(SETTINGS, tolerance=Tolerance(rtol=1e-3), checks=7, sanitizer=True)
    with Run.create(tmp_path / "run", "test", {}, {}) as run:
        tuned, _ = _tuned(0.9, 0.8, settings, run)
    assert tuned.improved and run.record.result is not None
    compared = run.record.result["comparison"]
    assert (compared["checks"], compared["equal"]) == (7, "within rtol 0.001, atol 0")
    assert compared["tolerance"] == {"rtol": 1e-3, "atol": 0.0}
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["compared"]["tolerance"] == {"rtol": 1e-3, "atol": 0.0}
    assert run.record.result["spent"]["patch"] > 0
    assert run.record.result["sanitizer"]["racecheck"] == {"answer": "did not run", "detail": "why"}
    row = record(Store(tmp_path / "store"), _source(), settings, tuned, {"gpu": "A GPU"})
    known = Store(tmp_path / "store").provenance(row)
    assert (known.checks, known.tolerance) == (7, Tolerance(rtol=1e-3))


def test_a_winner_with_errors_of_its_own_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {"memcheck": SanitizerReport("clean"), "racecheck": SanitizerReport("errors")}
    monkeypatch.setattr(job, "sanitize", lambda kernel, cubin, plan: reports)
    tuned, original = _tuned(0.9, 0.8, replace(SETTINGS, sanitizer=True))
    assert not tuned.improved and tuned.sanitized == reports
    assert tuned.cubin == original
