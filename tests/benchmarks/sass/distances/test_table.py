"""Only distances that the experiment could have refuted go to the table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.distances.table import main, reason_to_drop, table_rows

ROW: dict[str, Any] = {
    "pair": "FFMA>R|FADD.a",
    "names": ["FFMA>R|FADD.1"],
    "above_sighting": False,
    "largest_wrong": 3,
    "wrong_but_not_stale": 0,
    "smallest_right": 4,
    "minimum": 4,
    "windows": 100,
    "safe": 9,
}


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
    assert bool(table_rows([row])) == (not reason)


def test_a_name_has_the_largest_minimum_of_its_pairs_and_the_margin() -> None:
    other = ROW | {"smallest_right": 5, "minimum": 5}
    assert table_rows([ROW, other]) == {"FFMA>R|FADD.1": [7, 5, 200]}
    assert table_rows([ROW, ROW | {"problem": "blind"}]) == {}


def test_a_distance_that_the_default_table_has_is_left_out() -> None:
    assert table_rows([ROW | {"safe": 6}]) == {}


def test_the_command_writes_the_table(tmp_path: Path) -> None:
    result = tmp_path / "result.json.gz"
    content = {"gpu": {"gpu": "G"}, "date": "d", "rows": [ROW, ROW | {"problem": "blind: 1%"}]}
    result.write_bytes(gzip.compress(json.dumps(content).encode()))
    main([str(result), "--out", str(tmp_path / "measured" / "sm_90.json")])
    table = json.loads((tmp_path / "measured" / "sm_90.json").read_text())
    assert table["margin"] == 2 and table["RAW"] == {}
    assert table["pairs"] == {"kept": 1, "blind": 1}
