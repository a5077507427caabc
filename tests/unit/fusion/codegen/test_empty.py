"""Graphs with an axis of no elements: what reads or makes nothing is left to PyTorch, and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fusion.codegen.process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

GRAPHS = 40


def test_random_graphs_with_empty_axes_are_right(tmp_path: Path) -> None:
    found = run_interpreted("tests.unit.fusion.codegen.empty_graphs", tmp_path, GRAPHS)
    assert found["wrong"] == []
    assert found["seen"]["graphs"] == GRAPHS
    # A sum over nothing is something that kernels go on with.
    assert found["seen"]["kernels"] >= GRAPHS / 4
    assert found["reasons"].keys() == {"no elements; there is nothing to launch"}
    assert found["reasons"].popitem()[1] >= 2 * GRAPHS
    assert found["compiled"] == []
