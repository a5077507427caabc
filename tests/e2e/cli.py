"""Run the command line in a process; returns its exit code and its output."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nostall.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NVCC = ROOT / "tests" / "corpus" / "nvcc"
SMALL = EXAMPLES / "nvcc" / "transpose.sm_90.cubin"
LAUNCH = EXAMPLES / "nvcc" / "transpose.toml"
TIMEOUT_SECONDS = 240


@dataclass(frozen=True)
class Done:
    """Exit code and output of a finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """The environment without variables that change the output, and with ``changes``."""
    ignored = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    return {**inherited, "COLUMNS": "200", **changes}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "nostall", *map(str, args)]


def nostall(*args: object, cwd: Path | None = None, **changes: str) -> Done:
    """Run ``nostall`` with these arguments and environment variables."""
    process = subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        cwd=cwd,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Done(process.returncode, process.stdout, process.stderr)


def nostall_here(*args: object, cwd: Path | None = None, **changes: str) -> Done:
    """As :func:`nostall`, but in this process, so that imports and compilation happen once."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name, value in {"COLUMNS": "200", **changes}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["nostall", *map(str, args)])
        if cwd is not None:
            patch.chdir(cwd)
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def error_line(done: Done, code: int = 2) -> str:
    """The message of a failed command: one line on standard error and no other output."""
    assert done.code == code, (done.code, done.out, done.err)
    assert done.out == ""
    assert "Traceback" not in done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("nostall: "), done.err
    return lines[0]
