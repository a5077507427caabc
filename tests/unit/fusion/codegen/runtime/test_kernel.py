"""Sources of stitched kernels: what runs is the checked text, whatever lies beside its file."""

from __future__ import annotations

import importlib.util
import inspect
import os
import py_compile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.fusion.codegen.runtime.kernel import clear_source_cache, load_source
from nostall.store.artefacts import content_hash

SOURCE = "def kernel():\n    return 'checked'\n"
FORGED = "def kernel():\n    return 'forged!'\n"


def _forge_bytecode(path: Path) -> None:
    """Write bytecode of another source beside ``path``, valid by its time and its size."""
    path.write_text(FORGED)
    os.utime(path, (1e9, 1e9))
    py_compile.compile(str(path), doraise=True)
    path.write_text(SOURCE)
    os.utime(path, (1e9, 1e9))


def test_a_bytecode_file_beside_the_source_is_not_run(tmp_path: Path) -> None:
    clear_source_cache()
    path, _ = load_source(SOURCE, ["kernel"], tmp_path)
    _forge_bytecode(path)
    spec = importlib.util.spec_from_file_location("imported", path)
    assert spec is not None and spec.loader is not None
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    assert imported.kernel() == "forged!"  # an import would run it
    clear_source_cache()
    again, (kernel,) = load_source(SOURCE, ["kernel"], tmp_path)
    assert again == path
    assert kernel() == "checked"


def test_the_source_that_triton_reads_is_the_checked_one(tmp_path: Path) -> None:
    clear_source_cache()
    path, (kernel,) = load_source(SOURCE, ["kernel"], tmp_path)
    assert path.name == f"{content_hash(SOURCE.encode())}.py"
    path.write_text(FORGED)
    assert inspect.getsource(kernel) == SOURCE
    assert inspect.getsourcefile(kernel) == str(path)
    assert not (path.parent / "__pycache__").exists()
