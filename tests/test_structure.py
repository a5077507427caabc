"""The structure figures: how they are counted, and the limits that the source tree keeps."""

from __future__ import annotations

import subprocess
import sys
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


def wheel_files(root: Path) -> set[Path]:
    """The files of the package that setuptools would put into a wheel built in ``root``.

    An editable installation has every file of the tree, so it does not show what a wheel lacks,
    such as data that no pattern of ``pyproject.toml`` names.
    """
    program = (
        "from setuptools import Distribution\n"
        "distribution = Distribution({'script_name': 'setup.py'})\n"
        "distribution.parse_config_files(['pyproject.toml'])\n"
        "distribution.include_package_data = False\n"  # else it writes a folder into the tree
        "build = distribution.get_command_obj('build_py')\n"
        "build.ensure_finalized()\n"
        "print(*(file for _, _, file in build.find_all_modules()), sep='\\n')\n"
        "for _, folder, _, names in build.data_files:\n"
        "    print(*(f'{folder}/{name}' for name in names), sep='\\n')\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return {root / line for line in listed.splitlines() if line}


def package_files(root: Path) -> set[Path]:
    return {
        file
        for file in (root / "src" / "nostall").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".md"
    }


def test_the_wheel_has_every_file_of_the_package() -> None:
    pytest.importorskip("setuptools")
    assert package_files(ROOT) - wheel_files(ROOT) == set()


def test_a_file_that_the_wheel_lacks_is_found(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"))
    package = tmp_path / "src" / "nostall"
    (package / "part").mkdir(parents=True)
    for file in ("__init__.py", "py.typed", "part/__init__.py", "part/table.json"):
        (package / file).touch()
    missing = package_files(tmp_path) - wheel_files(tmp_path)
    assert missing == {package / "part" / "table.json"}
