"""Contrast of texts in the reports: at least 4.5 in light and in dark mode (WCAG 2.2, AA)."""

from __future__ import annotations

import re
from itertools import product

import pytest
from benchmarks.front.demo import FOUND, INK, PAPER, PROMPT, SOFT
from benchmarks.front.picture import THEMES

from benchmarks.learning import figure
from nostall.report.plan import gantt
from nostall.report.plan import sharding as sharding_page
from tests.unit.report.templates import read_template

LEAST = 4.5
LEAST_OF_LINES = 3.0
"""For lines of a plot (WCAG 2.2, non-text contrast)."""
PAGE, WORKLOAD, FUSION = (read_template(f"{n}.css") for n in ("page", "workload", "fusion"))
TEXTS = [
    *product(("ink", "soft", "accent", "good", "bad", "mark"), ("card", "bg")),
    *product(("ink", "soft"), ("hover",)),
    *product(("ink",), ("sel", "mark-bg", "good-bg", "bad-bg", "bg")),
    ("good", "good-bg"), ("bad", "bad-bg"), ("mark", "mark-bg"), ("ch", "ch-bg"),
    *product(("on",), ("p-data", "p-compute", "p-memory", "p-weights", "p-copies")),
    *product(("ink",), ("p-input", "p-sync", "p-host", "p-launch", "p-once", "p-other")),
]  # fmt: skip
"""Pairs of a text's colour and the colour behind it, by the names of the style sheets."""


def colours(style: str, mode: str) -> dict[str, str]:
    """The variables of a style sheet in one mode; dark ones replace those of light mode."""
    dark = re.findall(r"@media \(prefers-color-scheme: dark\) \{\s*:root \{(.*?)\}", style, re.S)
    light = re.sub(r"@media \(prefers-color-scheme: dark\) \{\s*:root \{.*?\}\s*\}", "", style,
                   flags=re.S)  # fmt: skip
    blocks = re.findall(r":root \{(.*?)\}", light, re.S) + (dark if mode == "dark" else [])
    return dict(re.findall(r"--([\w-]+): (#\w+);", " ".join(blocks)))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours (WCAG 2.2, definition of contrast ratio)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    red, green, blue = (_linear(part) for part in parts(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def parts(colour: str) -> tuple[float, ...]:
    digits = colour.removeprefix("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    return tuple(int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)


def mixed(colour: str, paper: str, share: float) -> str:
    """``color-mix(in srgb, colour share, paper)``."""
    found = (share * a + (1 - share) * b for a, b in zip(parts(colour), parts(paper), strict=True))
    return "#" + "".join(f"{round(255 * value):02x}" for value in found)


def test_the_ratio_is_that_of_the_definition() -> None:
    assert contrast("#000", "#fff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # WCAG's example
    assert contrast("#15803d", "#e8f6ec") == pytest.approx(4.49, abs=0.01)  # axe-core says so


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize(("text", "behind"), TEXTS, ids=lambda name: name)
def test_a_text_of_a_page_can_be_read(text: str, behind: str, mode: str) -> None:
    found = colours(PAGE, mode) | colours(WORKLOAD, mode)
    assert contrast(found[text], found[behind]) >= LEAST


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_operators_of_a_fusion_can_be_read(mode: str) -> None:
    found = colours(PAGE, mode)
    mixes = re.findall(r"--op: color-mix\(in srgb, var\(--(\w+)\) (\d+)%, var\(--card\)\)", FUSION)
    assert len(mixes) == 4
    for colour, share in mixes:
        behind = mixed(found[colour], found["card"], int(share) / 100)
        assert contrast(found["ink"], behind) >= LEAST, colour


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_texts_of_the_gantt_chart_can_be_read(mode: str) -> None:
    style = gantt._STYLE
    light, _, dark = style.partition("@media(prefers-color-scheme:dark)")
    found = dict(re.findall(r"--gantt-(\w+):(#\w+)", light))
    if mode == "dark":
        found |= dict(re.findall(r"--gantt-(\w+):(#\w+)", dark))
    assert all(contrast(found[name], found["paper"]) >= LEAST for name in ("ink", "soft"))


@pytest.mark.parametrize("mode", THEMES)
def test_texts_of_the_picture_can_be_read(mode: str) -> None:
    theme = THEMES[mode]
    assert contrast(theme.ink, theme.paper) >= LEAST
    assert contrast(theme.soft, theme.paper) >= LEAST


LINES = ("p-data", "p-compute", "p-memory", "p-weights", "l-pcie", "l-nvlink", "l-ethernet")


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("line", [*LINES, "good", "r2", "accent"])
def test_a_line_of_a_plot_can_be_seen(line: str, mode: str) -> None:
    found = colours(PAGE, mode) | colours(WORKLOAD, mode)
    assert contrast(found[line], found["card"]) >= LEAST_OF_LINES


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_texts_of_the_sharding_picture_can_be_read(mode: str) -> None:
    behind = [*sharding_page._COLOURS.values(), sharding_page._OTHER]
    assert all(contrast("#000000", colour) >= LEAST for colour in behind)
    light, _, dark = sharding_page._STYLE.partition("@media(prefers-color-scheme:dark)")
    found = dict(re.findall(r"--(\w+):(#\w+)", light))
    if mode == "dark":
        found |= dict(re.findall(r"--(\w+):(#\w+)", dark))
    assert all(contrast(found[name], found["paper"]) >= LEAST for name in ("ink", "soft"))


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_texts_of_the_learning_curves_can_be_read(mode: str) -> None:
    light, _, dark = figure._STYLE.partition("@media(prefers-color-scheme:dark)")
    found = dict(re.findall(r"(text|\.title|\.paper)\{(?:[^}]*;)?fill:(#\w+)", light))
    if mode == "dark":
        found |= dict(re.findall(r"(text|\.title|\.paper)\{fill:(#\w+)", dark))
    assert contrast(found["text"], found[".paper"]) >= LEAST
    assert contrast(found[".title"], found[".paper"]) >= LEAST


@pytest.mark.parametrize("ink", [FOUND, INK, PROMPT, SOFT])
def test_texts_of_the_demonstration_can_be_read(ink: str) -> None:
    assert contrast(ink, PAPER) >= LEAST
