"""Tests of the fusion results page and its committed results."""

from __future__ import annotations

from benchmarks.fusion.page import PAGE, text
from benchmarks.harness.result_file import load, results


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion`"


def test_no_committed_partition_beats_the_proven_optimum() -> None:
    result = load(results("fusion") / "explorers.json")
    proven = [record for record in result["records"] if record["proven"]]
    assert len(proven) >= 50
    assert all(min(record["gaps"].values()) > -1e-6 for record in proven)
    assert result["summary"]["gaps"]["explorer"]["within_3_percent"] == len(proven)
