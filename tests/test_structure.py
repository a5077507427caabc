"""The structure figures: how they are counted, and the limits that the source tree keeps."""

from __future__ import annotations

from pathlib import Path

from tools.structure import count_code_lines, measure

ROOT = Path(__file__).resolve().parents[1]

SOURCE = '''"""Docstring."""

# comment
def double(x):
    """Docstring
    of two lines."""
    text = """a string
    of two lines"""
    return 2 * x, text
'''


def test_code_lines_exclude_comments_and_docstrings() -> None:
    assert count_code_lines(SOURCE) == 4


def test_the_source_tree_keeps_its_limits() -> None:
    structure = measure(ROOT, ROOT / "src" / "nostall")
    assert structure.largest_folder_modules <= 20
    assert structure.cycles == []
    assert len(structure.long_functions) <= 5
    assert structure.many_parameters == []
