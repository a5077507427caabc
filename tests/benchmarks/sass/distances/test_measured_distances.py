"""The summary names what needs an explanation, and a result is compared with compilers'."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.sass.distances.measured_distances import (
    compared,
    print_distances,
    print_witnesses,
)
from benchmarks.sass.distances.recompare import recompared

PLAN: dict[str, Any] = {
    "kind": "RAW", "joint": False, "names": ["n"], "coarse": "c", "sighting": 5, "floor": 4,
    "safe": 9
}  # fmt: skip
RESULT: dict[str, Any] = {
    "pair": "A|B", "largest_wrong": 3, "smallest_right": 4, "wrong_but_not_stale": 0
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "above"), [(3, False), (4, False), (5, True)])
def test_a_minimum_above_a_sighting_is_marked(wrong: int, above: bool) -> None:
    row = compared(RESULT | {"largest_wrong": wrong}, PLAN)
    assert row["minimum"] == wrong + 1 and row["above_sighting"] is above


def test_results_are_compared_with_the_distances_of_another_archive() -> None:
    rows = [compared(RESULT, PLAN), compared(RESULT | {"pair": "gone"}, PLAN)]
    again = recompared({"gpu": {"gpu": "G"}, "rows": rows}, [PLAN | {"pair": "A|B", "sighting": 3}])
    assert again["gpu"] == {"gpu": "G"} and again["above_sighting"] == ["A|B"]
    assert [(row["pair"], row["sighting"], row["minimum"]) for row in again["rows"]] == [
        ("A|B", 3, 4)
    ]


def test_a_pair_that_no_compiler_left_is_not_above_a_sighting() -> None:
    assert compared(RESULT, PLAN | {"sighting": None})["above_sighting"] is False


def test_the_summary_lists_suspicious_pairs_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        compared(RESULT | {"largest_wrong": 7}, PLAN),
        compared({"pair": "C|D", "problem": "blind: 0%"}, PLAN),
    ]
    print_distances(rows, [{"task": "E|F", "detail": "first\nlast line"}], wanted=3)
    text = capsys.readouterr().out
    assert "wanted 3, measured 1" in text and "ABOVE SIGHTING  A|B" in text
    assert "BLIND           C|D" in text and "last line" in text


def test_broken_orders_and_cases_without_evidence_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def row(case: str, covered: int, uncovered: int, is_control: bool = False) -> dict[str, Any]:
        return {"case": case, "covered_wrong": covered, "uncovered_wrong": uncovered,
                "results": 9, "is_control": is_control}  # fmt: skip

    rows = [row("kept", 0, 3), row("broken", 1, 3), row("silent", 0, 0), row("other", 2, 2, True)]
    print_witnesses([*rows, {"case": "x", "problem": "memory"}], [])
    text = capsys.readouterr().out
    assert "kept in 1 cases, broken in 1, no evidence from 1, controls 1, not run 1" in text
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["BROKEN", "CONTROL", "NO"]
