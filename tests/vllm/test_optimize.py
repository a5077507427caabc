"""`nostall optimize` on a program around vLLM's CPU engine, and its bundle: ``make test-vllm``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed; run `make test-vllm`"
)
PROGRAM = Path(__file__).with_name("offline.py")
TOOL = Path(sys.executable).with_name("nostall")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``words`` and the program in ``folder``."""
    environment = {
        **os.environ,
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    work = folder / "work"
    work.mkdir(exist_ok=True)
    command = [str(TOOL), *words, "--", sys.executable, str(PROGRAM), str(folder / "model")]
    return subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=1200
    )


def test_prefix_caching_is_proven_and_applied(tmp_path: Path) -> None:
    from generate import save_model

    save_model(tmp_path / "model")
    done = run(tmp_path, "optimize", "--minutes", "8", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["watched"]["step_is"] == "one call of LLM.generate of vLLM"
    assert "prefix caching" in result["kept"]
    assert result["together"]["verdict"] == "faster"
    levels = {level["name"]: level for level in result["levels"]}
    assert levels["nostall attention"]["share"] > 0.5 and not levels["nostall attention"]["change"]
    bundle = tmp_path / "out" / "bundle.json"
    applied = run(tmp_path, "apply", "--bundle", str(bundle))
    assert applied.returncode == 0 and applied.stdout.count("tokens") == 4
    assert "nostall: applied prefix caching" in applied.stderr
    assert "not applied" not in applied.stderr
