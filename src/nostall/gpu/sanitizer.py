"""Run compute-sanitizer on a candidate: bad accesses, shared-memory races, misused barriers.

The candidate runs once in a separate process under each tool.  Kinds of errors that the tool also
reports for the original do not count against the candidate.
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
from nostall.gpu.device import Kernel, MeasurementPlan

TOOLS = ("memcheck", "racecheck", "synccheck")
_PROGRAM = "compute-sanitizer"
_ERRORS_EXIT_CODE = 66
"""Exit code of the program if it reported errors (``--error-exitcode``)."""
_DEADLINE_SECONDS = 300.0
Answer = Literal["clean", "as the original", "errors", "did not run"]
Run = Callable[[Sequence[str], float], tuple[int, str]]
"""(command, deadline in seconds) -> exit code, output on stdout and stderr."""


@dataclass(frozen=True)
class SanitizerReport:
    """Result of one tool for a candidate."""

    answer: Answer
    detail: str = ""
    """The tool's first message, unless ``answer`` is ``clean``."""


def find() -> str:
    """The path of compute-sanitizer.

    Raises :class:`MissingPart` if it is not installed.
    """
    for path in (shutil.which(_PROGRAM), "/usr/local/cuda/bin/" + _PROGRAM):
        if path and Path(path).exists():
            return path
    raise MissingPart(
        f"{_PROGRAM} is not on the PATH; it comes with the CUDA toolkit (package "
        "cuda-sanitizer); install it, or leave --sanitizer out"
    )


def sanitize(
    kernel: Kernel,
    cubin: bytes,
    plan: MeasurementPlan,
    ordinal: int = 0,
    run: Run | None = None,
) -> Mapping[str, SanitizerReport]:
    """Run each tool on the candidate ``cubin`` of a kernel; reports by tool."""
    program, run = find(), run or _run
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        files = {}
        for name, data in (("original", kernel.cubin), ("candidate", cubin)):
            files[name] = Path(folder) / f"{name}.pickle"
            files[name].write_bytes(pickle.dumps((kernel, data, plan, ordinal)))
        return {tool: _report(program, tool, files, run) for tool in TOOLS}


def _report(program: str, tool: str, files: Mapping[str, Path], run: Run) -> SanitizerReport:
    code, output = run(_command(program, tool, files["candidate"]), _DEADLINE_SECONDS)
    if code == 0:
        return SanitizerReport("clean")
    if code != _ERRORS_EXIT_CODE or _is_unsupported(output):
        return SanitizerReport("did not run", _first_message(output) or f"exit code {code}")
    original_code, original_output = run(
        _command(program, tool, files["original"]), _DEADLINE_SECONDS
    )
    if original_code == _ERRORS_EXIT_CODE and _error_kinds(original_output) >= _error_kinds(output):
        return SanitizerReport("as the original", _first_message(original_output))
    return SanitizerReport("errors", _first_message(output))


def _command(program: str, tool: str, file: Path) -> list[str]:
    # nostall makes driver calls that may fail, such as cuFuncGetParamInfo; memcheck would report
    # them.
    options = ("--report-api-errors", "no") if tool == "memcheck" else ()
    exit_code = str(_ERRORS_EXIT_CODE)
    return [
        *(program, "--tool", tool, "--error-exitcode", exit_code, "--print-limit", "20", *options),
        *(sys.executable, "-m", "nostall.gpu.sanitizer_target", str(file)),
    ]


def _run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        result = subprocess.run(
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
        return -1, f"it did not end within {seconds:g} s"
    except OSError as error:
        return -1, str(error)
    return result.returncode, result.stdout


def _messages(output: str) -> list[str]:
    """The tool's own lines of the output, without the header."""
    lines = [line.lstrip("= ").strip() for line in output.splitlines() if line.startswith("=====")]
    return [line for line in lines if line and line != "COMPUTE-SANITIZER"]


def _error_kinds(output: str) -> set[str]:
    """The kinds of errors, without addresses and counts, which differ from run to run."""
    is_error = re.compile(
        r"^(Error|Warning|Invalid|Barrier|Potential|Race|Uninit|Misaligned|Program)"
    )
    errors = (line for line in _messages(output) if is_error.match(line))
    return {re.sub(r"0x[0-9a-f]+|\d+", "#", line.split(" at ")[0]) for line in errors}


def _first_message(output: str) -> str:
    """The tool's first line, or the first line of the output if it printed none."""
    lines = _messages(output) or [line.strip() for line in output.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def _is_unsupported(output: str) -> bool:
    return "not supported" in output.lower()
