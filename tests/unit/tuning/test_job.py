"""The tuning job on a device: which candidate becomes the result, and what is recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from nostall.core import Run, Tolerance
from nostall.core.errors import UnsupportedArchitecture
from nostall.gpu import Outcome
from nostall.gpu.device import Status
from nostall.gpu.sanitizer import SanitizerReport
from nostall.sass import Program
from nostall.sass.safety import verify
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.mobility import tight_schedule
from nostall.search import Anneal, make
from nostall.store import Store
from nostall.tuning import distance_check, job
from nostall.tuning.distance_check import are_measured, check_distances
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.records.store_records import record_result
from nostall.tuning.settings import Settings
from tests.unit.tuning.fake_device import NVCC, SETTINGS, FakeDevice, load_example


def tune_example(
    search_factor: float, final_factor: float, settings: Settings = SETTINGS, run: Run | None = None
) -> tuple[TuningResult, bytes]:
    """The result of tuning an example on a :class:`FakeDevice`, and the original's bytes."""
    source = load_example()
    device = FakeDevice(search_factor, final_factor, source.cubin)
    return tune(source, Anneal(), settings, run=run, device=device), source.cubin


def test_a_gain_that_the_final_comparison_confirms_is_the_result() -> None:
    result, original = tune_example(search_factor=0.9, final_factor=0.8)
    assert result.improved
    assert result.cubin != original
    assert result.ratio == pytest.approx(1.25)
    assert result.search.best_measurement.kind == "measured"


@pytest.mark.parametrize("final_factor", [1.0, 1.2, -1.0])
def test_without_a_confirmed_gain_the_original_is_the_result(final_factor: float) -> None:
    result, original = tune_example(search_factor=0.9, final_factor=final_factor)
    assert not result.improved
    assert result.cubin == original
    assert result.ratio == 1.0


def test_the_original_is_not_an_improvement_of_itself() -> None:
    result, original = tune_example(search_factor=1.1, final_factor=0.8)
    assert not result.improved or result.cubin != original


def test_the_run_and_the_store_record_how_outputs_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = {
        "memcheck": SanitizerReport("clean"),
        "racecheck": SanitizerReport("did not run", "why"),
    }
    monkeypatch.setattr(job, "sanitize", lambda kernel, cubin, plan: reports)
    settings = replace(SETTINGS, tolerance=Tolerance(rtol=1e-3), checks=7, sanitizer=True)
    with Run.create(tmp_path / "run", "test", {}, {}) as run:
        result, _ = tune_example(0.9, 0.8, settings, run)
    assert result.improved and run.record.result is not None
    comparison = run.record.result["comparison"]
    assert (comparison["checks"], comparison["equal"]) == (7, "within rtol 0.001, atol 0")
    assert comparison["tolerance"] == {"rtol": 1e-3, "atol": 0.0}
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["compared"]["tolerance"] == {"rtol": 1e-3, "atol": 0.0}
    assert run.record.result["spent"]["patch"] > 0
    assert run.record.result["sanitizer"]["racecheck"] == {"answer": "did not run", "detail": "why"}
    store = Store(tmp_path / "store")
    row = record_result(store, load_example(), settings, result, {"gpu": "A GPU"})
    stored = store.provenance(row)
    assert (stored.checks, stored.tolerance) == (7, Tolerance(rtol=1e-3))


def test_a_candidate_with_sanitizer_errors_is_not_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = {"memcheck": SanitizerReport("clean"), "racecheck": SanitizerReport("errors")}
    monkeypatch.setattr(job, "sanitize", lambda kernel, cubin, plan: reports)
    result, original = tune_example(0.9, 0.8, replace(SETTINGS, sanitizer=True))
    assert not result.improved and result.sanitizer_reports == reports
    assert result.cubin == original


def test_sip_needs_no_count_of_operations() -> None:
    """A memory-bound kernel has no useful one; the scale of its times is enough."""
    source = load_example()
    assert source.launch is not None
    memory_bound = replace(source, launch=source.launch.model_copy(update={"flops": None}))
    first, second = (
        tune(memory_bound, make("sip"), Settings(strategy="sip", evaluations=40)) for _ in range(2)
    )
    assert first.search.evaluations == 40
    assert first.cubin == second.cubin
    assert first.verdict.safe
    device = FakeDevice(0.9, 0.8, source.cubin)
    assert tune(memory_bound, make("sip"), SETTINGS, device=device).improved


def test_distances_that_were_not_measured_are_checked_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU on which the table's distances give other outputs times no candidate."""
    original = (NVCC / "dot_product.sm_80.cubin").read_bytes()
    source = replace(load_example(), cubin=original)
    assert are_measured(load_example().cubin) and not are_measured(original)
    device = FakeDevice(0.9, 0.8, original)
    program = Program.from_cubin(original)
    space = ScheduleSpace(program, program.kernel("dot_product"))
    tight = tight_schedule(space, 20, 1)
    assert int(tight.stall.sum()) < int(space.start().stall.sum())
    assert verify(original, space.impose(tight).to_cubin()).safe
    seen: list[bytes] = []

    def evaluate(cubin: bytes, status: Status = "timed") -> Outcome:
        seen.append(cubin)
        return Outcome(status, detail="7 words differ")

    device.evaluate = evaluate  # type: ignore[method-assign]
    monkeypatch.setattr(distance_check, "WALKS", (0, 30))
    assert check_distances(space, device) == len(seen) > 1
    seen.clear()
    device.evaluate = partial(evaluate, status="wrong")  # type: ignore[method-assign]
    with pytest.raises(UnsupportedArchitecture, match=r"sm_80 permits: wrong on none .7 words"):
        tune(source, Anneal(), SETTINGS, device=device)
    assert len(seen) == 1
