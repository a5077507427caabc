"""Processes of checks, which may run under compute-sanitizer's memcheck."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")


def start(arguments: Sequence[str], out: Path, sanitizer: str | None) -> subprocess.Popen[bytes]:
    """A Python process whose output goes to ``out`` with the suffix ``.log``.

    Under ``sanitizer`` (the command of compute-sanitizer) each tensor is an allocation of its own.
    """
    command, environment = [sys.executable, *arguments], dict(os.environ)
    if sanitizer is not None:
        command = [sanitizer, "--tool", "memcheck", *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def exit_code(process: subprocess.Popen[bytes], end: float) -> int | None:
    """The exit code; None if the process was killed at a time of the monotonic clock."""
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def memory_errors(log: str) -> int | None:
    """The number of errors in the output of memcheck; None if it does not tell."""
    found = _ERRORS.search(log)
    return int(found.group(1)) if found else None
