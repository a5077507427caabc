"""The assembler suite on a device whose times are given: records, both baselines, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from benchmarks.kernels.suite import entries
from benchmarks.ptx.assembler_cell import Baseline, Cell, measure
from benchmarks.ptx.assembler_suite import Plan, ResultFile, measure_cell, missing_cells, table
from benchmarks.ptx.spike_peer import describe

from benchmarks.ptx import assembler_suite
from nostall.gpu import Kernel, MeasurementPlan
from nostall.ptx.assemble.versions import find_assemblers
from nostall.tuning.assembler import job, objective
from nostall.tuning.sources.source import Source
from tests.unit.tuning.assembler.kernel import InlineWorkers, TimedDevice, make_source


@contextmanager
def open_fake(kernel: Kernel, plan: MeasurementPlan) -> Iterator[TimedDevice]:
    yield TimedDevice(kernel.cubin)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    installed = find_assemblers()[:1]
    monkeypatch.setattr(job, "BuildPool", InlineWorkers)
    monkeypatch.setattr(objective, "find_hazards", lambda builder, cubin: "")
    monkeypatch.setattr(job, "find_assemblers", lambda: installed)
    return make_source(installed[0])


def make_cell(method: str = "assembler") -> Cell:
    return Cell("scale", method, 0, 20.0, checks=2, evaluations=25, open=open_fake)


def make_plan(tmp_path: Path, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "entries": entries()[:1],
        "methods": ("assembler", "anneal"),
        "seeds": (0, 1),
        "seconds": 1.0,
        "until": monotonic() + 1000,
        "out": tmp_path / "out.json",
        "spike": None,
        "configurations": 1,
        "workers": None,
    }
    return Plan(**(fields | changes))


def test_a_record_has_both_baselines_the_counts_and_the_settings(source: Source) -> None:
    record = measure(make_cell(), Baseline(source, ()))
    assert record["over_a"]["verdict"] == "faster" and record["deployed"] > 1
    assert len(record["over_a"]["us"]["null"]) == 200
    assert record["counts"]["timed"] > 2 and 0 <= record["search"]["idle_share"] <= 1
    assert record["over_b"]["ratio"] <= record["over_a"]["ratio"] + 1e-9
    assert record["search"]["winner"]["registers"] > 0
    assert record["original_us"] == pytest.approx(10.0)
    assert "scale" in "\n".join(table([record]))


def test_a_method_that_fails_is_recorded_and_the_next_one_runs(
    source: Source, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path)
    results = ResultFile(plan.out)
    measure_cell(make_cell("spike"), Baseline(source, ()), plan, results)
    (failure,) = ResultFile(plan.out).failures
    assert failure["method"] == "spike" and "--spike FOLDER" in failure["error"]


def test_a_second_run_measures_what_is_missing(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    name = plan.entries[0].name
    keys = [cell.key for cell in missing_cells(plan, plan.entries[0], {(name, "assembler", 0)})]
    assert keys == [(name, "anneal", 0), (name, "assembler", 1), (name, "anneal", 1)]


def test_nothing_starts_that_cannot_end_in_time(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path, until=monotonic() + 10)
    measure_cell(make_cell(), Baseline(source, ()), plan, ResultFile(plan.out))
    assert "no time left" in capsys.readouterr().out and not plan.out.exists()


def test_a_kernel_without_a_build_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler_suite, "ProcessPoolExecutor", FakePool)
    plan = make_plan(tmp_path)
    results = assembler_suite.run(plan, {})
    assert results.failures[0]["method"] == "baseline" and not results.records


class FakePool:
    """Replaces the compiler processes."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def map(self, *_: object) -> Iterator[str]:
        return iter(["this kernel does not compile"])

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_the_peer_gets_kernels_with_one_output(source: Source) -> None:
    with pytest.raises(ValueError, match="one output"):
        describe(source)
