"""Tests of the plots of the workload pages: axis labels and distributions."""

from __future__ import annotations

import re

import pytest

from nostall.report.workload import Line, _unbroken, cdf_corners, line_plot


def tick_labels(svg: str) -> list[str]:
    """Texts of the tick labels of a plot."""
    return re.findall(r'<text class="tick"[^>]*>([^<]+)</text>', svg)


@pytest.mark.parametrize(("low", "high"), [(0.52, 0.58), (0.9, 1.2), (0.25, 16.0), (1e-3, 1e4)])
def test_a_narrow_logarithmic_axis_has_labels(low: float, high: float) -> None:
    svg = str(line_plot([Line("x", "l", [low, high], [0.0, 1.0])], "times", "jobs", log=True))
    y_labels = tick_labels(str(line_plot([Line("x", "l", [0.0, 1.0], [0.0, 1.0])], "", "")))
    x_labels = [label for label in tick_labels(svg) if label not in y_labels]
    assert 2 <= len(x_labels) <= 9
    assert all(low * 0.99 <= float(label) <= high * 1.01 for label in x_labels)


def test_a_distribution_rises_in_steps_from_0_to_1() -> None:
    x, y = cdf_corners([1.0, 3.0, 4.0], [0.2, 0.7, 1.0])
    assert (x, y) == ([1, 1, 3, 3, 4, 4], [0, 0.2, 0.2, 0.7, 0.7, 1])
    values = [float(n) for n in range(5000)]
    x, y = cdf_corners(values, [(n + 1) / 5000 for n in values])
    assert (x[0], x[-1], y[0], y[-1]) == (0, 4999, 0, 1)
    assert len(x) <= 400


def test_a_marked_value_is_in_the_axis() -> None:
    lines = [Line("x", "l", [0.5, 0.6], [0.0, 1.0])]
    svg = str(line_plot(lines, "times", "jobs", log=True, mark=1.0))
    assert re.search(r'<path class="mark" d="M606\.0 ', svg)  # at the right edge of the axes
    assert 'class="mark"' not in str(line_plot(lines, "times", "jobs", log=True))


def test_options_of_a_remedy_are_not_broken() -> None:
    text = _unbroken("nostall tune <FILE> --objective gpu")
    assert text == 'nostall tune &lt;FILE&gt; <span class="option">--objective</span> gpu'
