"""compute-sanitizer over a candidate: bad accesses, races in shared memory, misused barriers.

The candidate runs once in a process of its own, under each tool.  What the original shows as well
does not count against it: the tools do not know every instruction, and reports that the original
gives are the original's.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nostall.core.errors import MissingPart
from nostall.gpu.device import Kernel, Plan

TOOLS = ("memcheck", "racecheck", "synccheck")
_TOOL = "compute-sanitizer"
_FOUND = 66
"""Exit code of the tool when it found something."""
_SECONDS = 300.0
Answer = Literal["clean", "as the original", "errors", "did not run"]
Run = Callable[[Sequence[str], float], tuple[int, str]]
"""(command, deadline in seconds) -> exit code, everything that was printed."""


@dataclass(frozen=True)
class Sanitized:
    """What one tool says of a candidate; ``detail`` is its first words where it is not clean."""

    answer: Answer
    detail: str = ""


def find() -> str:
    """The tool's path; :class:`MissingPart` where it is not installed."""
    for place in (shutil.which(_TOOL), "/usr/local/cuda/bin/" + _TOOL):
        if place and Path(place).exists():
            return place
    raise MissingPart(
        f"{_TOOL} is not on the PATH; it comes with the CUDA toolkit (package "
        "cuda-sanitizer); install it, or leave --sanitizer out"
    )


def sanitize(
    kernel: Kernel, cubin: bytes, plan: Plan, ordinal: int = 0, run: Run | None = None
) -> Mapping[str, Sanitized]:
    """What each tool says of ``cubin`` in place of the kernel's original."""
    tool, run = find(), run or _run
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        files = {}
        for name, bytes_ in (("original", kernel.cubin), ("candidate", cubin)):
            files[name] = Path(folder) / f"{name}.pickle"
            files[name].write_bytes(pickle.dumps((kernel, bytes_, plan, ordinal)))
        return {each: _one(tool, each, files, run) for each in TOOLS}


def _one(tool: str, which: str, files: Mapping[str, Path], run: Run) -> Sanitized:
    code, text = run(_command(tool, which, files["candidate"]), _SECONDS)
    if code == 0:
        return Sanitized("clean")
    if code != _FOUND or _unsupported(text):
        return Sanitized("did not run", _first(text) or f"exit code {code}")
    before, said = run(_command(tool, which, files["original"]), _SECONDS)
    if before == _FOUND and _kinds(said) >= _kinds(text):
        return Sanitized("as the original", _first(said))
    return Sanitized("errors", _first(text))


def _command(tool: str, which: str, file: Path) -> list[str]:
    # The worker itself asks the driver questions that may be answered with an error.
    own = ("--report-api-errors", "no") if which == "memcheck" else ()
    return [
        *(tool, "--tool", which, "--error-exitcode", str(_FOUND), "--print-limit", "20", *own),
        *(sys.executable, "-m", "nostall.gpu.sanitized", str(file)),
    ]


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {seconds:g} s"
    except OSError as error:
        return -1, str(error)
    return done.returncode, done.stdout


def _lines(text: str) -> list[str]:
    """What the tool itself said; addresses and numbers differ from run to run."""
    found = [line.lstrip("= ").strip() for line in text.splitlines() if line.startswith("=====")]
    return [line for line in found if line and line != "COMPUTE-SANITIZER"]


def _kinds(text: str) -> set[str]:
    """The kinds of errors, without where and how often."""
    wanted = re.compile(
        r"^(Error|Warning|Invalid|Barrier|Potential|Race|Uninit|Misaligned|Program)"
    )
    kinds = (line for line in _lines(text) if wanted.match(line))
    return {re.sub(r"0x[0-9a-f]+|\d+", "#", line.split(" at ")[0]) for line in kinds}


def _first(text: str) -> str:
    lines = _lines(text) or [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _unsupported(text: str) -> bool:
    return "not supported" in text.lower()
