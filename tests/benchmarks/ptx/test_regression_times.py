"""Times of what a newer ptxas lost: all kernels are measured, and those that lost most searched."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.ptx.regression_times import lost, summary

from benchmarks.ptx import regression_times
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
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

    run_inline(monkeypatch)
    monkeypatch.setattr(regression_times, "_open", open_device)
    monkeypatch.setattr(
        regression_times, "read", lambda *_: ({"pressure": case}, {"other": "no launch"})
    )
    (tmp_path / "kernels").touch()
    (tmp_path / "1" / "bin").mkdir(parents=True)
    (tmp_path / "1" / "bin" / "ptxas").symlink_to(NEWEST.path)
    given = {
        "ptxas": tmp_path,
        "file": tmp_path / "kernels",
        "write": False,
        "least": 0.02,
        "kernels": ["pres*"],
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
    assert document["kind"] == "measured" and document["not_launchable"] == {"other": "no launch"}
    assert row["screened"]["ratio"] == pytest.approx(1.25) and lost(row) == pytest.approx(0.25)
    assert row["measured"]["older"]["ratio"] == pytest.approx(1.25)
    assert row["static"]["losses"] and row["gpu"] == {"gpu": "Fake"}
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


def test_without_time_a_row_says_so(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = measured(case, 0.8, tmp_path, monkeypatch, budget_s=1.0)
    assert document["rows"]["pressure"] == {"failure": "no time left"}
    assert document["summary"]["timed"] == 0 and summary({})["recovered_median"] is None


def test_kernels_travel_in_a_file(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = Assembler(NEWEST.path, "1.0"), Assembler(NEWEST.path, "2.0")
    launched, unknown = case.source, replace(case.source, launch=None)
    jobs = {"a": launched, "b": unknown, "c": launched, "d": launched}

    def compare(source: Source, assemblers: object) -> list[dict[str, Any]]:
        assert assemblers == (older, newer)
        words = 900 if source is launched or source is unknown else 100
        return [{"code": n, "spill_bytes": 0, "warps": 8, "words": n * words} for n in (1, 2)]

    def make(source: Source, *versions: object) -> Case:
        pair = [replace(b, assembler=a) for b, a in ((case.older, older), (case.newer, newer))]
        return Case(source, case.command, *pair)

    monkeypatch.setattr(regression_times, "assemble", compare)
    monkeypatch.setattr(regression_times, "make_case", make)
    monkeypatch.setattr(
        regression_times, "jobs", lambda *_: [(n, lambda s=s: s) for n, s in jobs.items()]
    )
    options = argparse.Namespace(file=tmp_path / "k", kernels=["a", "b", "c"], configurations=4)
    with pytest.raises(KeyError):  # the launch is for sm_80, and sm_90 is measured
        regression_times.write(options, older, newer)
        regression_times.read(options.file, older, newer)[0]["a"]
    monkeypatch.setattr(regression_times, "SM", 80)
    options.file.unlink()
    regression_times.write(options, older, newer)
    there = Assembler(Path("elsewhere"), "2.0")
    cases, refused = regression_times.read(options.file, older, there)
    assert list(cases) == ["a", "c"] and refused == {"b": "its launch is not known"}
    assert cases["a"].newer.assembler == there and cases["a"].older.assembler == older
    assert cases["a"].newer.cubin == case.newer.cubin
