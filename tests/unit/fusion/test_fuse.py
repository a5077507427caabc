"""PyTorch functions with stitched regions, in Triton's interpreter in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]


def test_a_module_and_its_gradients_are_as_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.fusion.fusing", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["forward"] < 1e-5
    assert result["backward"] < 1e-4
    forward, backward = result["graphs"]
    assert forward >= 3
    assert backward >= 3
    assert result["other shape"] < 1e-5
    assert result["structure"] == {
        "sum": pytest.approx(0, abs=1e-5),
        "sorted": pytest.approx(0, abs=1e-5),
    }
    assert result["refused"] == ["aten.sort.default: unsupported operator"]
