"""The structure figures: how they are counted, and the limits that the source tree keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.structure import (
    MAX_FILE_LINES,
    MAX_MODULES,
    count_code_lines,
    large_folders,
    long_files,
    measure,
)

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
    assert structure.cycles == []
    assert len(structure.long_functions) <= 5
    assert structure.many_parameters == []


@pytest.mark.parametrize("folder", ["src", "benchmarks", "tests", "tools", "examples"])
def test_folders_and_files_are_small(folder: str) -> None:
    assert large_folders(ROOT, ROOT / folder) == []
    assert long_files(ROOT, ROOT / folder) == []


def test_large_folders_and_long_files_are_found(tmp_path: Path) -> None:
    large, small = tmp_path / "tree" / "large", tmp_path / "tree" / "small"
    for folder, count in ((large, MAX_MODULES + 1), (small, MAX_MODULES)):
        folder.mkdir(parents=True)
        for name in ("__init__", *(f"module_{number}" for number in range(count))):
            (folder / f"{name}.py").write_text("pass\n" * MAX_FILE_LINES)
    assert large_folders(tmp_path, tmp_path / "tree") == ["tree/large 16"]
    assert long_files(tmp_path, tmp_path / "tree") == []
    (small / "module_0.py").write_text("pass\n" * (MAX_FILE_LINES + 1))
    assert long_files(tmp_path, tmp_path / "tree") == ["tree/small/module_0.py 601"]
