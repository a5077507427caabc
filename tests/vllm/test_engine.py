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


def generate(
    folder: Path, speculate: int, ours: bool, table: Path | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Tokens of the engine in a process of its own, and the steps that were counted."""
    environment = {
        **os.environ,
        "NOSTALL_VLLM_CPU": "1" if ours else "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NOSTALL_VLLM_LINEAR": str(table or ""),
    }
    command = [sys.executable, str(SCRIPT), str(folder), "--speculate", str(speculate)]
    command += ["--dtype", dtype]
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


def test_linear_layers_run_by_a_table(tmp_path: Path) -> None:
    from nostall.serving.gemm.config import LinearShape
    from nostall.serving.gemm.gpu_layer import library_versions
    from nostall.serving.gemm.table import GemmTable, Padded, Row, save_tables

    versions = tuple(library_versions().items())
    shapes = (LinearShape(512, 256), LinearShape(256, 256), LinearShape(1024, 256))
    rows = (Row(15, Padded(8)), Row(96, Padded(32)))
    table = tmp_path / "table.json"
    save_tables(table, [GemmTable(shape, "cpu", versions, rows) for shape in shapes])
    own = generate(tmp_path, 0, ours=False, dtype="bfloat16")
    found = generate(tmp_path, 0, ours=False, table=table, dtype="bfloat16")
    assert own["served"] == {}
    assert found["served"] == {"linear layer": 6}
    assert found["left to vLLM"] == {"linear layers of shapes without a table": 2}
    # Other orders of summation round differently, so later tokens may differ.
    assert [tokens[0] for tokens in found["tokens"]] == [tokens[0] for tokens in own["tokens"]]
