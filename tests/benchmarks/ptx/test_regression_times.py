"""Times of what a newer ptxas lost: all kernels are measured, and those that lost most searched."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ptx.compilers import regression_times
from benchmarks.ptx.compilers.regression_times import Builds, is_wanted, lost, summary, try_builds
from benchmarks.sass.build_comparison import ProcessTimer

from nostall.ptx.assemble.versions import find_assemblers, version_numbers
from nostall.tuning.regress.job import Case
from nostall.tuning.sources.source import Source
from tests.unit.tuning.assembler.kernel import TimedDevice, run_inline
from tests.unit.tuning.regress.pressure import make_case

NEWEST = max(find_assemblers(), key=lambda a: version_numbers(a.version))


class Opened(TimedDevice):
    """A device on which the older binary takes a part of the newer one's time."""

    older: bytes
    part: float

    def factor(self, cubin: bytes) -> float:
        return self.part if cubin == self.older else super().factor(cubin)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(NEWEST)


def measured(
    case: Case, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, Any]:
    """The result file of one kernel whose older binary takes this part of the time."""

    def open_device(case: Case, cubin: bytes, settings: object) -> Opened:
        device = Opened(cubin)
        device.older, device.part = case.older.cubin, part
        return device

    class Timer(ProcessTimer):
        def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
            return [10.0 * (part if s.cubin == case.older.cubin else 1.0) for s in sources]

    assert case.command is not None
    plain = dict(case.source.provenance)
    source = replace(case.source, cubin=case.newer.cubin, provenance=plain)
    builds = Builds(source, case.command, {"0.1": case.older.cubin})
    found = [("other", "its launch is not known"), ("pressure", builds)]
    if "prepare" in options:  # through the files of the first half
        regression_times.prepare(options.pop("prepare"), found)
    run_inline(monkeypatch)
    monkeypatch.setattr(regression_times, "_open", open_device)
    monkeypatch.setattr(regression_times, "survey", lambda *_: iter(found))
    monkeypatch.setattr(regression_times, "ProcessTimer", Timer)
    (tmp_path / "1" / "bin").mkdir(parents=True, exist_ok=True)
    if not (link := tmp_path / "1" / "bin" / "ptxas").exists():
        link.symlink_to(NEWEST.path)
    given = {
        "prepare": None,
        "cases": None,
        "ptxas": tmp_path,
        "configurations": 1,
        "survey_s": 100.0,
        "workers": 1,
        "kernels": ["none"],
    }
    limits = {
        "least": 0.02,
        "seconds": None,
        "evaluations": 20,
        "budget_s": 1000.0,
        "out": tmp_path / "out.json",
    }
    assert regression_times.main(argparse.Namespace(**{**given, **limits, **options})) == 0
    document: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return document


def test_lost_time_is_searched_and_compared_with_the_older_binary(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = measured(case, 0.8, tmp_path, monkeypatch)
    row = document["rows"]["pressure"]
    assert document["kind"] == "measured"
    assert document["not_timed"] == {"other": "its launch is not known"}
    assert row["screened"]["ratio"] == pytest.approx(1.25) and lost(row) == pytest.approx(0.25)
    assert row["measured"]["older"]["ratio"] == pytest.approx(1.25)
    assert row["static"]["losses"] and row["measured"]["gpu"] == {"gpu": "Fake"}
    assert 0 < row["measured"]["recovered"] < 0.9 and row["measured"]["search"]["recipe"]
    assert row["measured"]["beside_older"]["verdict"]
    assert document["summary"]["slower"] == document["summary"]["compared"] == 1
    assert document["summary"]["recovered"] == 0
    assert document["summary"]["recovered_median"] == pytest.approx(
        row["measured"]["recovered"], abs=1e-4
    )


@pytest.mark.parametrize("part", [1.0, 0.99, 1.2])
def test_without_a_loss_nothing_is_searched(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    document = measured(case, part, tmp_path, monkeypatch)
    assert "measured" not in document["rows"]["pressure"]
    assert document["summary"]["slower"] == document["summary"]["compared"] == 0


@pytest.mark.slow
def test_a_second_run_searches_what_the_first_had_no_time_for(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = measured(case, 0.8, tmp_path, monkeypatch, budget_s=1.0)
    assert document["rows"]["pressure"]["screened"]["ratio"] == pytest.approx(1.25)
    assert document["summary"]["timed"] == 1 and document["summary"]["compared"] == 0
    assert summary({})["recovered_median"] is None
    rows, others = document["rows"], document["not_timed"]
    assert is_wanted("pressure", rows, others) and not is_wanted("other", rows, others)
    document = measured(case, 0.8, tmp_path, monkeypatch)
    assert document["summary"]["compared"] == 1
    assert not is_wanted("pressure", document["rows"], others)


def test_only_launches_of_this_gpu_with_other_code_are_timed(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(source: Source, older: dict[str, bytes]) -> Builds | str:
        assert case.command is not None
        made = Builds(source, case.command, older)
        monkeypatch.setattr(regression_times, "make_builds", lambda *_: made)
        return try_builds(("a", lambda: source), [NEWEST], NEWEST)

    older = {"0.1": case.older.cubin}
    assert tried(case.source, older) == "compiled for sm_80"
    monkeypatch.setattr(regression_times, "SM", 80)
    assert isinstance(tried(case.source, older), Builds)
    assert tried(replace(case.source, launch=None), older) == "its launch is not known"
    assert tried(case.source, {}) == "same code"


def test_builds_of_another_machine_are_timed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "cases"
    document = measured(case, 0.8, tmp_path, monkeypatch, prepare=files, cases=files, least=0.5)
    row = document["rows"]["pressure"]
    assert row["screened"] == {
        "ratio": pytest.approx(1.25), "older": "0.1", "us": {"newest": 10.0, "0.1": 8.0}
    }  # fmt: skip
    assert document["not_timed"] and document["summary"]["compared"] == 0
