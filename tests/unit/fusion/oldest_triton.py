"""Stitched kernels compiled by the oldest Triton that is supported, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.fusion.codegen.launching import launch_specs
from nostall.fusion.codegen.program import Program

OLDEST = Path(__file__).resolve().parents[3] / ".cache" / "triton-3.6.0"
_COMPILE = """
import sys
from pathlib import Path
from nostall.core import LaunchSpec
from nostall.tuning.source import compile_triton

folder = Path(sys.argv[1])
launch = LaunchSpec.model_validate_json((folder / "launch.json").read_text())
made = compile_triton(folder / "kernels.py", sys.argv[2], launch)
assert made.provenance["compiler"] == "triton 3.6.0"
print(made.launch.shared)
"""


def shared_bytes(program: Program, folder: Path) -> int:
    """Shared memory of the cubin for sm_90; the test is skipped where that Triton is missing."""
    if not OLDEST.is_dir():
        pytest.skip("no Triton 3.6.0 in .cache (see tests/corpus/build.py)")
    ((name, launch),) = launch_specs(program).items()
    (folder / "kernels.py").write_text(program.source)
    (folder / "launch.json").write_text(launch.model_dump_json())
    path = f"{OLDEST}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(folder), name],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)
