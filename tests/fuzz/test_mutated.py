"""Damaged cubins: only the documented errors, within memory and time (CI's slice).

The whole run is ``python -m benchmarks run sass.fuzz``; its result is in ``benchmarks/sass/results/fuzz.json``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nostall.core.errors import BadBinary
from tests.fuzz import harness
from tests.fuzz.harness import Report, batch, limited, originals, own_mutant, tool_mutant
from tests.fuzz.mutants import Mutant

OWN, TOOL = 3000, 20
PEAK_MIB = 600
SLOWEST = 5.0


def test_our_own_parsers() -> None:
    total = Report()
    for report in limited("own", range(1_000_000, 1_000_000 + OWN), OWN):
        total.add(report)
    assert total.failures == []
    assert sum(total.outcomes.values()) == OWN
    assert set(total.outcomes) <= {"parsed", "BadBinary", "UnsupportedArchitecture"}
    assert min(total.outcomes["parsed"], total.outcomes["BadBinary"]) > OWN // 10
    assert total.slowest["seconds"] < SLOWEST
    assert total.peak_rss_mib < PEAK_MIB


def test_the_whole_way_through_the_vendors_tool() -> None:
    report = batch("tool", range(1_000_000, 1_000_000 + TOOL))
    assert report.failures == []
    assert sum(report.outcomes.values()) == TOOL
    parsed = [name for name in report.outcomes if name.startswith("parsed")]
    assert parsed and report.outcomes["BadBinary"]


@pytest.mark.parametrize("make", [own_mutant, tool_mutant])
def test_a_mutant_follows_from_its_seed(make: Callable[[int], Mutant]) -> None:
    assert make(7) == make(7)
    assert len({make(seed).data for seed in range(50)}) > 40


def test_most_mutants_differ_from_their_original() -> None:
    known = {o.data for o in originals()}
    assert sum(own_mutant(seed).data in known for seed in range(200)) < 20


def with_judge(monkeypatch: pytest.MonkeyPatch, judge: Callable[[bytes], str]) -> Report:
    monkeypatch.setattr(harness, "_ways", lambda: {"own": (own_mutant, judge, 0.2)})
    return batch("own", range(3))


def test_the_harness_notices_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_judge(monkeypatch, lambda data: str(1 // 0))
    assert report.outcomes == {"crash": 3}
    assert "ZeroDivisionError at test_mutated.py" in report.failures[0]["what"]


def test_the_harness_notices_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(data: bytes) -> str:
        while True:
            pass

    report = with_judge(monkeypatch, forever)
    assert report.outcomes == {"hang": 3}
    assert len(report.failures) == 3


def test_the_harness_notices_an_error_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(data: bytes) -> str:
        raise BadBinary("")

    report = with_judge(monkeypatch, silent)
    assert [f["what"] for f in report.failures] == ["BadBinary without a message"] * 3
