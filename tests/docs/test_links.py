"""Relative links of all Markdown files lead to files and headings that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
GENERATED = {ROOT / "docs" / "reference" / "cli.md"}
"""Pages that only the documentation build writes."""


def markdown_files() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them and as the site makes them."""
    headings = [heading.lower().strip() for heading in HEADING.findall(text)]
    github = {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}
    return github | {re.sub(r"[^a-z0-9]+", "-", heading).strip("-") for heading in headings}


@pytest.mark.parametrize("page", markdown_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file in GENERATED:
            continue
        is_missing = not file.exists()
        if is_missing or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert broken == []


def test_no_line_begins_with_a_percent_sign() -> None:
    """MyST would take the line as a comment and leave it out."""
    pages = [page for page in markdown_files() if "docs" in page.parts]
    assert [page for page in pages if re.search("^ {0,3}%", page.read_text(), re.MULTILINE)] == []
