"""What a program imports that runs an earlier choice: it must not pay for what finds kernels."""

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
from nostall.fusion.testing.triton_interpreter import prepare
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
    gap = float((function(x) - program(x)).abs().max())
(report,) = backend.reports
ours = [name for name in sys.modules if name.startswith("nostall.")]
print(json.dumps([report.state, report.reason, report.from_store, gap, ours]))
"""


def run(place: Path, options: dict[str, Any]) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(options)],
        env=os.environ
        | {
            "TRITON_INTERPRET": "1",
            "NOSTALL_HOME": str(place / "home"),
            "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


FINDS, DECIDES = (
    "nostall.attach.torch_compile.rewrite.matching",
    "nostall.attach.torch_compile.selection.candidate_builder",
)
ASKED = {"nostall.choose": "stitched", "pattern_matcher": False}
CHOSEN = {"nostall.race": 0, "nostall.background": False, "pattern_matcher": False, "seconds": 0.5}
LEFT = {**CHOSEN, "nostall.rest": "eager", "seconds": 2.0}


@pytest.mark.parametrize(
    ("options", "version", "needed"),
    [(ASKED, "stitched", FINDS), (CHOSEN, "stitched", DECIDES), (LEFT, "inductor", DECIDES)],
)
def test_an_earlier_choice_is_run_without_what_finds_one(
    tmp_path: Path, options: dict[str, Any], version: str, needed: str
) -> None:
    """Where PyTorch's caches have the graph."""
    (state, reason, _, gap, cold), again = run(tmp_path, options), run(tmp_path, options)
    assert state == version and gap < 1e-6 and needed in cold
    assert again[:2] == [state, reason] and again[3] == gap
    assert again[2] == (options is not ASKED), "the choice comes from the store"
    assert not {FINDS, DECIDES, "nostall.fusion.explore"} & {*again[4]}


def test_neither_the_backend_nor_what_runs_kernels_pays_for_the_packages_they_stand_in() -> None:
    said = "import sys, nostall.attach.torch_compile.backend, nostall.attach.torch_compile.runtime.custom_op as o"
    command = [sys.executable, "-c", f"{said}; print(o.STITCHED, *sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    heavy = {"pydantic", "nostall.core.launch", "nostall.store.store", "nostall.fusion.graph.graph"}
    assert "nostall.stitched" in done.stdout and not heavy & {*done.stdout.split()}
