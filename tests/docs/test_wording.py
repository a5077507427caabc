"""One fact has one wording: what the SM model's ranking is worth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nostall.report.tune.summary import model_caution as reported
from nostall.sass.model.agreement import RANKING_WORTH, model_caution
from tests.docs.test_links import ROOT, markdown_files

SOFTER = re.compile(
    r"ranks?\s+schedules\s+(?!no\s+better\s+than\s+chance)|only\s+roughly|"
    r"hardly\s+better\s+than\s+chance|chance\s+on\s+most"
)
STATING = ("docs/explanation/sm-model.md", "docs/explanation/learning.md", "README.md",
           "docs/explanation/measuring.md", "docs/results/sass-modelled.md",
           "docs/tutorials/first-kernel.md")  # fmt: skip
"""Pages that state it."""


@pytest.mark.parametrize("page", markdown_files(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_says_it_more_softly(page: Path) -> None:
    assert not SOFTER.findall(page.read_text("utf-8"))


@pytest.mark.parametrize("name", STATING)
def test_pages_use_the_words_of_the_program(name: str) -> None:
    assert RANKING_WORTH in " ".join((ROOT / name).read_text("utf-8").split())


def test_the_result_and_the_help_use_them() -> None:
    assert f"The model {RANKING_WORTH}: " in model_caution() == reported()
