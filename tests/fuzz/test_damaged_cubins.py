"""Damaged cubins raise only documented errors, within limits of memory and time.

These tests run few mutants. ``python -m benchmarks run sass.fuzz`` runs many more; its result is
in ``benchmarks/sass/results/fuzz.json``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nostall.core.errors import BadBinary
from tests.fuzz import harness
from tests.fuzz.harness import Report, originals, parser_mutant, run_batch, run_limited, tool_mutant
from tests.fuzz.mutants import Mutant

FEW, OWN, TOOL = 1000, 3000, 20
PEAK_MIB = 600
SLOWEST = 5.0


@pytest.mark.parametrize("count", [FEW, pytest.param(OWN, marks=pytest.mark.slow)])
def test_own_parsers_with_damaged_cubins(count: int) -> None:
    total = Report()
    for report in run_limited("own", range(1_000_000, 1_000_000 + count), count):
        total.add(report)
    assert total.failures == []
    assert sum(total.outcomes.values()) == count
    assert set(total.outcomes) <= {"parsed", "BadBinary", "UnsupportedArchitecture"}
    assert min(total.outcomes["parsed"], total.outcomes["BadBinary"]) > count // 10
    assert total.slowest["seconds"] < SLOWEST
    assert total.peak_rss_mib < PEAK_MIB


@pytest.mark.slow
def test_nvdisasm_and_verifier_with_damaged_cubins() -> None:
    report = run_batch("tool", range(1_000_000, 1_000_000 + TOOL))
    assert report.failures == []
    assert sum(report.outcomes.values()) == TOOL
    parsed = [name for name in report.outcomes if name.startswith("parsed")]
    assert parsed and report.outcomes["BadBinary"]


@pytest.mark.parametrize("make", [parser_mutant, tool_mutant])
def test_the_seed_determines_a_mutant(make: Callable[[int], Mutant]) -> None:
    assert make(7) == make(7)
    assert len({make(seed).data for seed in range(50)}) > 40


def test_most_mutants_differ_from_their_original() -> None:
    known = {o.data for o in originals()}
    assert sum(parser_mutant(seed).data in known for seed in range(200)) < 20


def run_three_mutants(monkeypatch: pytest.MonkeyPatch, run: Callable[[bytes], str]) -> Report:
    """Run three mutants through ``run`` with a time limit of 0.2 s."""
    monkeypatch.setattr(harness, "_targets", lambda: {"own": (parser_mutant, run, 0.2)})
    return run_batch("own", range(3))


def test_the_harness_reports_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_three_mutants(monkeypatch, lambda data: str(1 // 0))
    assert report.outcomes == {"crash": 3}
    assert "ZeroDivisionError at test_damaged_cubins.py" in report.failures[0]["what"]


def test_the_harness_reports_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(data: bytes) -> str:
        while True:
            pass

    report = run_three_mutants(monkeypatch, forever)
    assert report.outcomes == {"hang": 3}
    assert len(report.failures) == 3


def test_the_harness_reports_an_error_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(data: bytes) -> str:
        raise BadBinary("")

    report = run_three_mutants(monkeypatch, silent)
    assert [f["what"] for f in report.failures] == ["BadBinary without a message"] * 3
