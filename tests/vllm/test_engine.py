"""vLLM's CPU engine with nostall's task tables gives the same tokens as with its own attention.

Needs vLLM's CPU build in the environment of this process: ``make test-vllm``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"
)
SCRIPT = Path(__file__).with_name("generate.py")


def generate(folder: Path, speculate: int, ours: bool) -> dict[str, Any]:
    """Tokens of the engine in a process of its own, and the steps that were counted."""
    environment = {
        **os.environ,
        "NOSTALL_VLLM_CPU": "1" if ours else "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(SCRIPT), str(folder), "--speculate", str(speculate)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert run.returncode == 0 and lines, run.stderr[-2000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


@pytest.mark.parametrize("speculate", [0, 4])
def test_same_tokens(tmp_path: Path, speculate: int) -> None:
    expected = generate(tmp_path, speculate, ours=False)
    found = generate(tmp_path, speculate, ours=True)
    assert not expected["served"]
    assert found["tokens"] == expected["tokens"]
    assert found["served"]["mixed"] >= 4
    assert found["served"]["decode"] > 0
    if speculate:
        assert found["served"]["verify"] > 0
