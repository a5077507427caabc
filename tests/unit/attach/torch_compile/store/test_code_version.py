"""The code version that is part of every key of the store: any changed source file changes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

import nostall.attach.torch_compile
import nostall.fusion
from nostall.attach.torch_compile.store.kernel_store import code_version

PACKAGES = (nostall.fusion, nostall.attach.torch_compile)
FOLDERS = [
    (package, folder.relative_to(root).as_posix())
    for package in PACKAGES
    for root in map(Path, package.__path__)
    for folder in sorted({file.parent for file in root.rglob("*.py")})
]


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    code_version.cache_clear()
    yield
    code_version.cache_clear()


def test_folders_include_the_sub_packages() -> None:
    folders = {folder for _, folder in FOLDERS}
    assert {"store", "runtime", "rewrite", "measure", "workers", "selection"} <= folders
    assert {"capture", "graph", "codegen", "codegen/emit", "codegen/runtime"} <= folders


@pytest.mark.parametrize(("package", "folder"), FOLDERS)
def test_a_changed_byte_in_any_sub_package_changes_the_version(
    package: object, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = package.__path__  # type: ignore[attr-defined]
    copy = tmp_path / "package"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(package, "__path__", [str(copy)])
    before = code_version()
    file = min((copy / folder).glob("*.py"))
    file.write_bytes(file.read_bytes() + b"#")
    code_version.cache_clear()
    assert code_version() != before


@pytest.mark.parametrize("package", PACKAGES)
def test_a_renamed_file_changes_the_version(
    package: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = package.__path__  # type: ignore[attr-defined]
    copy = tmp_path / "package"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(package, "__path__", [str(copy)])
    before = code_version()
    (copy / "__init__.py").rename(copy / "renamed.py")
    code_version.cache_clear()
    assert code_version() != before
