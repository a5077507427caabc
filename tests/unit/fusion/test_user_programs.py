"""Tests that compiled programs of users compute what eager PyTorch computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.unit.fusion.user_programs.__main__ import PROGRAMS


@pytest.fixture(scope="module")
def wrong_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("programs")
    found: dict[str, list[str]] = run_interpreted("tests.unit.fusion.user_programs", folder)
    return found


@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_programs_compute_what_eager_pytorch_computes(
    wrong_results: dict[str, list[str]], kind: str
) -> None:
    assert wrong_results[kind] == []
