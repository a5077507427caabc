"""Only distances that the experiment could have refuted go to the table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.distances.table import Table, main, make_table, reason_to_drop

ROW: dict[str, Any] = {
    "pair": "FFMA>R|FADD.a",
    "kind": "RAW",
    "names": ["FFMA>R|FADD.1"],
    "joint": False,
    "above_sighting": False,
    "largest_wrong": 3,
    "wrong_but_not_stale": 0,
    "smallest_right": 4,
    "minimum": 4,
    "windows": 100,
    "safe": 9,
}


def rows_of(cycles: int) -> dict[str, dict[str, dict[str, int]]]:
    return {"RAW": {"FFMA>R": {"FADD.1": cycles}}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"problem": "blind: 0%"}, "blind"),
        ({"above_sighting": True}, "compilers"),
        ({"largest_wrong": 0}, "no distance"),
        ({"wrong_but_not_stale": 1}, "stale"),
        ({"smallest_right": None}, "delayed"),
    ],
)
def test_rows_without_evidence_are_dropped(change: dict[str, Any], reason: str) -> None:
    row = ROW | change
    assert reason in reason_to_drop(row) and bool(reason) == bool(reason_to_drop(row))
    table = make_table([[row]])
    assert table.minima == ({} if reason else rows_of(4))
    if not reason or reason in ("stale", "delayed"):
        assert table.refuted == (rows_of(4) if reason else {})


def test_a_name_has_the_largest_minimum_of_its_pairs() -> None:
    other = ROW | {"pair": "other", "largest_wrong": 4, "smallest_right": 5, "minimum": 5}
    assert make_table([[ROW, other]]).minima == rows_of(5)
    table = make_table([[ROW, ROW | {"pair": "other", "problem": "blind"}]])
    assert table.minima == {} and table.refuted == rows_of(4)


def test_a_later_result_replaces_an_earlier_one_but_not_its_wrong_results() -> None:
    unproven = ROW | {"smallest_right": None, "largest_wrong": 6, "minimum": 7}
    assert make_table([[unproven]]).refuted == rows_of(7)
    assert make_table([[unproven], [ROW]]).minima == rows_of(7)
    assert make_table([[ROW], [unproven]]).refuted == rows_of(7)


def test_several_words_together_refute_no_word_alone() -> None:
    both = ROW | {"pair": "both", "joint": True, "largest_wrong": 5, "minimum": 6,
                  "smallest_right": 6}  # fmt: skip
    assert make_table([[both]]) == Table({}, rows_of(6), {}, {"kept": 1})
    assert make_table([[both, ROW]]) == Table({}, rows_of(6), rows_of(4), {"kept": 2})


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    result = tmp_path / "result.json.gz"
    blind = ROW | {"pair": "blind", "names": ["A>R|B.1"], "problem": "blind: 1%"}
    content = {"gpu": {"gpu": "G"}, "date": "d", "rows": [ROW, blind]}
    result.write_bytes(gzip.compress(json.dumps(content).encode()))
    main([str(result), "--out", str(tmp_path / "measured" / "sm_90.json")])
    table = json.loads((tmp_path / "measured" / "sm_90.json").read_text())
    assert table["margin"] == 2 and table["minima"] == rows_of(4) and table["refuted"] == {}
    assert table["pairs"] == {"kept": 1, "blind": 1}
