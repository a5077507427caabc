"""The fusion results page matches the committed files."""

from __future__ import annotations

from benchmarks.fusion.page import PAGE, text
from benchmarks.harness.result_file import load, results


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion`"


def test_no_plan_of_the_file_beats_the_proven_optimum() -> None:
    found = load(results("fusion") / "explorers.json")
    proven = [record for record in found["records"] if record["proven"]]
    assert len(proven) >= 50
    assert all(min(record["gaps"].values()) > -1e-6 for record in proven)
    assert found["summary"]["gaps"]["explorer"]["within_3_percent"] == len(proven)
