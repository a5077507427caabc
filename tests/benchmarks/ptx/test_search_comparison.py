"""Comparison of search strategies on a device whose times are given."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from benchmarks.kernels.new_projects.entries import PROJECTS
from benchmarks.ptx.assembler_cell import Baseline
from benchmarks.ptx.assembler_suite import ResultFile
from benchmarks.ptx.search_comparison import (
    Plan,
    Prepared,
    compare,
    comparison_entries,
    mean_ratio,
    mean_rows,
    missing_strategies,
    table,
)

from benchmarks.ptx import search_comparison
from nostall.tuning.assembler.job import open_setup
from nostall.tuning.sources.source import Source
from tests.benchmarks.ptx.test_assembler_suite import open_fake, source

__all__ = ["source"]


def make_plan() -> Plan:
    return Plan(
        comparison_entries(),
        ("evolution", "random"),
        1,
        6.0,
        monotonic() + 1000,
        checks=2,
        workers=None,
        compilers=1,
        open=open_fake,
        evaluations=25,
    )


def test_the_split_is_fixed_and_at_least_half_is_unseen() -> None:
    chosen = comparison_entries()
    assert len({entry.name for entry in chosen}) == len(chosen) >= 34
    assert sum(entry.kernel in PROJECTS for entry in chosen[:24]) == 12
    assert sum(entry.kernel in PROJECTS for entry in chosen) == len(PROJECTS) == 25
    assert len(set(PROJECTS.values())) == 25


def test_both_strategies_get_a_record_and_a_second_call_measures_nothing(
    source: Source,
    tmp_path: Path,
) -> None:
    plan, results = make_plan(), ResultFile(tmp_path / "out.json")
    entry = plan.entries[0]
    stack = ExitStack()
    prepared = Prepared(Baseline(source, ()), stack.enter_context(open_setup(source)), stack)
    assert missing_strategies(plan, 2, entry, results) == ["random", "evolution"]
    with stack:
        both = ["evolution", "random"]
        compare(replace(plan, portfolio=True), entry, prepared, both, results)
    evolution, random = ResultFile(tmp_path / "out.json").records
    assert evolution["method"] == "evolution" and evolution["over_a"]["verdict"] == "faster"
    assert random["deployed"] > 1 and random["search"]["winner"]["levers"]
    assert random["portfolio"]["verdict"] == "faster" and random["portfolio_state"]
    assert random["over_b"]["verdict"] == "faster"
    assert missing_strategies(plan, 0, entry, results) == []
    text = "\n".join(table(results.records))
    assert "evolution over random" in text


def test_the_interval_of_a_mean_is_that_of_the_kernels() -> None:
    ratio, low, high = mean_ratio([[1.0, 1.1, 1.2]])
    assert low < ratio < high and ratio == pytest.approx(1.0969, abs=1e-3)
    assert mean_ratio([[1.01, 1.01]])[1] > 1


def test_turns_weigh_the_same_and_their_difference_is_no_noise() -> None:
    ratio, low, high = mean_ratio([[0.98, 0.981], [1.02, 1.021, 1.019]])
    assert ratio == pytest.approx(1.0, abs=1e-3) and high - low < 0.002
    kernel = {"kernel": "k", "seed": 1, "unseen": True, "instructions": None}
    records = [
        {**kernel, "kernel": n, "method": m, "place": place, "deployed": value}
        for n, turn in (("a", ("evolution", "random")), ("b", ("random", "evolution")))
        for place, (m, value) in enumerate(zip(turn, (1.0, 1.1), strict=True))
    ]
    row = next(mean_rows(records))
    assert row["ratio"] == pytest.approx(1.0) and row["pairs"] == 2 and row["before"] == 1


class DonePool:
    """Replaces the compiler processes: each build is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, *_: object) -> Future[str]:
        future: Future[str] = Future()
        future.set_result("built")
        return future

    def shutdown(self, **_: object) -> None: ...

    def __enter__(self) -> DonePool:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_call_prepares_the_next_kernel_and_goes_on_after_a_failure(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(make_plan(), entries=comparison_entries()[:3], seconds=0.1)
    baselines = [Baseline(source, ()), ValueError("does not run"), Baseline(source, ())]
    turns = iter([baselines[0], baselines[1], baselines[1], baselines[2]])

    def take(*_: object) -> Baseline:
        found = next(turns)
        if isinstance(found, ValueError):
            raise found
        return found

    monkeypatch.setattr(search_comparison, "ProcessPoolExecutor", DonePool)
    monkeypatch.setattr(search_comparison, "fastest_build", take)
    results = ResultFile(tmp_path / "out.json")
    search_comparison.run(plan, {e.name: [None] for e in plan.entries}, results)
    first, _, last = (entry.name for entry in plan.entries)
    assert [(r["kernel"], r["method"]) for r in results.records] == [
        (first, "evolution"),
        (first, "random"),
        (last, "random"),
        (last, "evolution"),
    ]
    assert [f["kernel"] for f in results.failures] == [plan.entries[1].name]
