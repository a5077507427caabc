"""Figures of the pages: axes that can be read, distributions that are steps."""

from __future__ import annotations

import re

import pytest

from nostall.report.workload.page import _short
from nostall.report.workload.plots import Line, curves, steps


def labels(svg: str) -> list[str]:
    return re.findall(r'<text class="tick"[^>]*>([^<]+)</text>', svg)


@pytest.mark.parametrize(("low", "high"), [(0.52, 0.58), (0.9, 1.2), (0.25, 16.0), (1e-3, 1e4)])
def test_a_logarithmic_axis_has_labels_however_narrow_it_is(low: float, high: float) -> None:
    svg = str(curves([Line("x", "l", [low, high], [0.0, 1.0])], "times", "jobs", log=True))
    up = labels(str(curves([Line("x", "l", [0.0, 1.0], [0.0, 1.0])], "", "")))
    across = [label for label in labels(svg) if label not in up]
    assert 2 <= len(across) <= 9
    assert all(low * 0.99 <= float(label) <= high * 1.01 for label in across)


def test_a_distribution_rises_in_steps_from_nothing_to_all() -> None:
    x, y = steps([1.0, 3.0, 4.0], [0.2, 0.7, 1.0])
    assert (x, y) == ([1, 1, 3, 3, 4, 4], [0, 0.2, 0.2, 0.7, 0.7, 1])
    many = [float(n) for n in range(5000)]
    x, y = steps(many, [(n + 1) / 5000 for n in many])
    assert (x[0], x[-1], y[0], y[-1]) == (0, 4999, 0, 1)
    assert len(x) <= 400


def test_long_names_keep_both_ends() -> None:
    assert _short("rank 3, GPU 0") == "rank 3, GPU 0"
    short = _short("h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz, GPU 0")
    assert len(short) == 25
    assert short.startswith("h100_Qwen") and short.endswith("GPU 0")
