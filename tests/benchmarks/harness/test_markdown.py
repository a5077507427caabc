"""Tables of generated pages."""

from __future__ import annotations

import pytest
from benchmarks.harness.markdown import align_numbers, table


@pytest.mark.parametrize(
    ("cells", "rule"),
    [
        (["1", "2.50", "1,000"], "---:"),
        (["1.2 s", "–", "3 ms"], "---:"),
        (["**1.02**", "-3 %", "1e-07"], "---:"),
        (["3 of 4", "1"], "---"),
        (["–", ""], "---"),
        ([r"a \| 1", "1"], "---"),
    ],
)
def test_columns_of_numbers_are_aligned_at_the_right(cells: list[str], rule: str) -> None:
    rows = [["name", cell] for cell in cells]
    text = table(("a", "b"), rows).replace(r"\\|", r"\|")
    found = align_numbers(text).splitlines()
    assert found[1] == f"|---|{rule}|"
    assert found[2:] == text.splitlines()[2:]


def test_a_table_with_rows_of_other_lengths_stays() -> None:
    text = "| a | b |\n|---|---|\n| 1 | 2 |\n| 1 |"
    assert align_numbers(text) == text
