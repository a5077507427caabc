"""Bars of shares on the workload pages, and the sentence that each page begins with."""

from __future__ import annotations

import re

import pytest

from nostall.report.workload import (
    ARCHITECTURE_WORDS,
    MIN_NUMBER,
    stacked_bars,
    used_styles,
)
from nostall.workload import Architecture

STYLES = {"compute": "c-compute", "memory": "c-memory", "idle_input": "c-idle_input"}
ROWS = [
    ("a <b>", {"compute": 0.7, "memory": 0.28, "idle_input": 0.02}),
    ("c", {"compute": 1.0, "memory": 0.0}),
]


def test_a_bar_has_a_part_for_each_share_and_fills_its_row() -> None:
    first, second = str(stacked_bars(ROWS, STYLES)).split('<div class="share">')[1:]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", first)]
    assert widths == [70, 28, 2]
    assert re.findall(r'title="([^"]+)"', second) == ["c: compute 100.0%"]
    assert 'title="a &lt;b&gt;: idle input 2.0%"' in first and "<b>" not in first


def test_a_share_without_room_has_no_number() -> None:
    shares = {"compute": 1 - MIN_NUMBER / 2, "memory": MIN_NUMBER / 2}
    bar = str(stacked_bars([("a", shares)], STYLES))
    assert re.findall(r">(\d+%)</i>", bar) == ["98%"]
    assert bar.count(' small"') == 1


@pytest.mark.parametrize(("rows", "parts"), [(ROWS, 3), (ROWS[1:], 1), ([], 0)])
def test_the_legend_has_the_parts_that_are_drawn(rows: list, parts: int) -> None:
    assert list(used_styles(rows, STYLES)) == list(STYLES)[:parts]


def test_each_architecture_is_explained() -> None:
    assert set(ARCHITECTURE_WORDS) == set(Architecture)
