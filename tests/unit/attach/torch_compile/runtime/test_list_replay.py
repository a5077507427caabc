"""Kernels over lists in replays: of a CUDA graph, and of their direct call with other values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.unit.fusion.codegen.interpreter_process import run_interpreted  # noqa: E402

ROOT = Path(__file__).resolve().parents[5]
MODULE = "tests.unit.attach.torch_compile.runtime.list_replay"


def check(found: Any) -> None:
    assert found["kernels"] == found["called"] == 2
    assert len(found["differences"]) == 3
    assert all(difference < 1e-5 for difference in found["differences"])


@pytest.mark.slow
def test_a_step_that_runs_again_on_the_same_memory_reads_its_new_values() -> None:
    check(run_interpreted(MODULE, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_captured_step_reads_the_values_of_each_replay() -> None:
    """In a process of its own, because others may have Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", MODULE, "cuda"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(json.loads(done.stdout))
