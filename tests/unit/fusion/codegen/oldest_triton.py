"""Compile stitched kernels with the oldest supported Triton, in a subprocess."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.launch_specs import launch_specs

INSTALLATION = Path(__file__).resolve().parents[4] / ".cache" / "triton-3.6.0"
_COMPILE = """
import json
import sys
import traceback
from pathlib import Path
from nostall.core import LaunchSpec
from nostall.tuning.sources.triton_source import compile_triton

def compiled(folder):
    for name, launch in json.loads((folder / "launches.json").read_text()).items():
        made = compile_triton(folder / "kernels.py", name, LaunchSpec.model_validate_json(launch))
        assert made.provenance["compiler"] == "triton 3.6.0"
        (folder / f"{name}.cubin").write_bytes(made.cubin)
        yield made.launch.shared

for line in sys.stdin:
    try:
        answer = list(compiled(Path(line.rstrip())))
    except Exception:
        answer = traceback.format_exc()
    print(json.dumps(answer), flush=True)
"""


@cache
def _compiler() -> subprocess.Popen[str]:
    """A process that compiles the folder in each input line and answers with a line of JSON: the
    bytes of shared memory of its kernels, or a traceback."""
    path = f"{INSTALLATION}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-c", _COMPILE],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def compile_program(program: Program, folder: Path) -> list[tuple[bytes, int]]:
    """The sm_90 cubin of each kernel and its bytes of shared memory.

    Skips the test if that Triton version is not installed in ``.cache``.
    """
    if not INSTALLATION.is_dir():
        pytest.skip("no Triton 3.6.0 in .cache (see tests/corpus/build.py)")
    launches = launch_specs(program)
    texts = {name: launch.model_dump_json() for name, launch in launches.items()}
    (folder / "kernels.py").write_text(program.source)
    (folder / "launches.json").write_text(json.dumps(texts))
    process = _compiler()
    assert process.stdin and process.stdout
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        _compiler.cache_clear()
        raise AssertionError(f"Triton 3.6.0 ended with {process.wait()}")
    answer = json.loads(line)
    assert isinstance(answer, list), answer
    cubins = [(folder / f"{name}.cubin").read_bytes() for name in launches]
    return list(zip(cubins, answer, strict=True))


def shared_bytes(program: Program, folder: Path) -> int:
    """The bytes of shared memory of a program with one kernel."""
    ((_, shared),) = compile_program(program, folder)
    return shared
