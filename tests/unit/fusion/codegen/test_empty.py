"""Tests of graphs with an axis of size 0: empty operators are left to PyTorch, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

GRAPHS = 40


@pytest.mark.slow
def test_random_graphs_with_empty_axes_compute_correct_values(tmp_path: Path) -> None:
    result = run_interpreted("tests.unit.fusion.codegen.interpreted.empty_graphs", tmp_path, GRAPHS)
    assert result["wrong"] == []
    assert result["seen"]["graphs"] == GRAPHS
    # A sum over an empty axis is 0 and has elements, so kernels can use it.
    assert result["seen"]["kernels"] >= GRAPHS / 4
    assert result["reasons"].keys() == {"no elements; there is nothing to launch"}
    assert result["reasons"].popitem()[1] >= 2 * GRAPHS
    assert result["compiled"] == []
