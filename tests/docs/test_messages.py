"""Messages and variables of the documentation are those of the program."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## What can go wrong"
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if SECTION in path.read_text("utf-8"))
QUOTED = re.compile(r'"([^"]{8,})"|`([^`]* [^`]*)`')


@cache
def literals() -> str:
    """The texts of all literals in the package; a value in an f-string is ``…``."""
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(map(shown, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def shown(part: ast.expr) -> str:
    """A part of an f-string."""
    return str(part.value) if isinstance(part, ast.Constant) else "…"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_quoted_messages_are_messages_of_the_program(page: Path) -> None:
    section = page.read_text("utf-8").partition(SECTION)[2]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    quoted = [a or b for row in rows for a, b in QUOTED.findall(row.split("|")[1])]
    parts = [part.strip() for message in quoted for part in re.split(r"…| \d[\d.]* |^N ", message)]
    missing = [part for part in parts if len(part) > 2 and part not in literals()]
    assert not missing


def test_variables_of_the_package_are_documented() -> None:
    used = set(re.findall(r"NOSTALL_[A-Z_]+", literals()))
    page = (ROOT / "docs" / "reference" / "environment.md").read_text("utf-8")
    assert used <= set(re.findall(r"NOSTALL_[A-Z_]+", page))
