"""Modules that a process with a stored selection imports: not those that make a selection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

PROGRAM = """
import json, sys
import torch
from nostall.attach.torch_compile.backend import Backend
from tools.interpreters.triton_interpreter import prepare
from nostall.gpu.clock import RecordedClock

def program(x):
    return torch.nn.functional.layer_norm(x, (24,)).softmax(-1)

prepare()
options = json.loads(sys.argv[1])
seconds = options.pop("seconds", 1.0)
clock = RecordedClock({"*": [[1.0] * 12, [seconds] * 12, [1.0] * 12]})
backend = Backend(clock)
function = torch.compile(program, backend=backend, options=options)
x = torch.arange(144.0).view(6, 24).sin()
with torch.no_grad():
    for _ in range(20):
        function(x)
    difference = float((function(x) - program(x)).abs().max())
(report,) = backend.reports
modules = [name for name in sys.modules if name.startswith("nostall.")]
print(json.dumps([report.state, report.reason, report.from_store, difference, modules]))
"""


def run_program(folder: Path, options: dict[str, Any]) -> Any:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(options)],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "NOSTALL_HOME": str(folder / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


MATCHING = "nostall.attach.torch_compile.rewrite.matching"
BUILDER = "nostall.attach.torch_compile.selection.candidate_builder"
# Options, and the times of the candidate (seconds) where 1.0 is Inductor's.
STITCHED = {"nostall.choose": "stitched", "pattern_matcher": False}
FASTER = {
    "nostall.tuned_plans": 0,
    "nostall.background": False,
    "pattern_matcher": False,
    "seconds": 0.5,
}
SLOWER = {**FASTER, "nostall.fallback": "eager", "seconds": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "version", "needed"),
    [
        (STITCHED, "stitched", MATCHING),
        (FASTER, "stitched", BUILDER),
        (SLOWER, "inductor", BUILDER),
    ],
)
def test_a_stored_selection_runs_without_the_modules_that_make_one(
    tmp_path: Path, options: dict[str, Any], version: str, needed: str
) -> None:
    """If PyTorch's caches have the graph."""
    first, again = run_program(tmp_path, options), run_program(tmp_path, options)
    state, reason, _, difference, modules = first
    assert state == version and difference < 1e-6 and needed in modules
    assert again[:2] == [state, reason] and again[3] == difference
    assert again[2] == (options is not STITCHED), "the selection comes from the store"
    assert not {MATCHING, BUILDER, "nostall.fusion.explore"} & {*again[4]}


def test_backend_and_custom_op_do_not_import_slow_packages() -> None:
    imports = (
        "import sys, nostall.attach.torch_compile.backend, "
        "nostall.attach.torch_compile.runtime.custom_op as op"
    )
    command = [sys.executable, "-c", f"{imports}; print(op.STITCHED_OP, *sys.modules)"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    slow = {"pydantic", "nostall.core.launch", "nostall.store.store", "nostall.fusion.graph.graph"}
    assert "nostall.stitched" in ran.stdout and not slow & {*ran.stdout.split()}
