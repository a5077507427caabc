"""Stitched kernels compiled by the oldest Triton that is supported, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nostall.fusion.codegen.launching import launch_specs
from nostall.fusion.codegen.program import Program

OLDEST = Path(__file__).resolve().parents[3] / ".cache" / "triton-3.6.0"
_COMPILE = """
import json
import sys
from pathlib import Path
from nostall.core import LaunchSpec
from nostall.tuning.source import compile_triton

folder = Path(sys.argv[1])
shared = []
for name, launch in json.loads((folder / "launches.json").read_text()).items():
    made = compile_triton(folder / "kernels.py", name, LaunchSpec.model_validate_json(launch))
    assert made.provenance["compiler"] == "triton 3.6.0"
    (folder / f"{name}.cubin").write_bytes(made.cubin)
    shared.append(made.launch.shared)
print(json.dumps(shared))
"""


def compiled(program: Program, folder: Path) -> list[tuple[bytes, int]]:
    """The cubin for sm_90 of each kernel, and its bytes of shared memory; the test is skipped where
    that Triton is missing."""
    if not OLDEST.is_dir():
        pytest.skip("no Triton 3.6.0 in .cache (see tests/corpus/build.py)")
    launches = launch_specs(program)
    texts = {name: launch.model_dump_json() for name, launch in launches.items()}
    (folder / "kernels.py").write_text(program.source)
    (folder / "launches.json").write_text(json.dumps(texts))
    path = f"{OLDEST}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cubins = [(folder / f"{name}.cubin").read_bytes() for name in launches]
    return list(zip(cubins, json.loads(done.stdout), strict=True))


def shared_bytes(program: Program, folder: Path) -> int:
    """Of the only kernel of a program."""
    ((_, shared),) = compiled(program, folder)
    return shared
