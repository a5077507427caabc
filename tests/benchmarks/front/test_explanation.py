"""Figures in the explanation pages come from committed results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.front.explanation import FOLDER, PAGES, filled, used

RUN = "run `python -m benchmarks page explanation`"
_FIGURE = re.compile(r"<!-- =[\w-]+ -->.*?<!-- / -->", re.DOTALL)
_RESULT = re.compile(r"\(\.\./\.\./benchmarks/\S*/results/\S*\)")
_NUMBER = re.compile(r"(?<![\w.-])\d+\.\d+|\d+ ?%|\d+(?:\.\d+)? (?:us|µs|ns|ms|s)\b")
TYPED = {
    "measuring.md": {"12 s", "24 s"},
    "safety.md": {"13.0"},
    "verifier-evidence.md": {"11.8", "12.9", "13.3"},
}
"""Numbers beside a link to a result that are no results: settings of a run, versions."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_figures_of_the_results(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    figures = PAGES[name]()
    assert text == filled(text, figures), RUN
    assert len(used(text)) == len(set(used(text))) == len(figures)


def test_a_changed_figure_is_noticed() -> None:
    text = "takes <!-- =a -->1 %<!-- / --> of it"
    assert filled(text, {"a": "2 %"}) == "takes <!-- =a -->2 %<!-- / --> of it"
    with pytest.raises(KeyError, match="does not show b"):
        filled(text, {"a": "2 %", "b": "3"})
    with pytest.raises(KeyError):
        filled(text, {})


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_numbers_beside_a_result_are_not_typed(page: Path) -> None:
    """A paragraph, an item or a row that links to a result file takes its numbers from there."""
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    for part in re.split(r"\n\n|\n(?=- |\| )", text):
        if _RESULT.search(part):
            typed = _NUMBER.findall(_RESULT.sub("", _FIGURE.sub("", part)))
            assert set(typed) <= TYPED.get(page.name, set[str]()), part
