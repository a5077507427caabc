"""Running the command line as a user does: a process, its exit code, and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NVCC = ROOT / "tests" / "corpus" / "nvcc"
SMALL = EXAMPLES / "nvcc" / "transpose.sm_90.cubin"
LAUNCH = EXAMPLES / "nvcc" / "transpose.toml"
SECONDS = 240


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """The environment without settings that change what is printed."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "COLUMNS": "200", **changes}


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "nostall", *map(str, args)]


def nostall(*args: object, cwd: Path | None = None, **changes: str) -> Done:
    """Run ``nostall`` with these arguments and environment variables."""
    done = subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=cwd,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, code: int = 2) -> str:
    """The one line of an error: nothing on standard output, no traceback."""
    assert done.code == code, (done.code, done.out, done.err)
    assert done.out == ""
    assert "Traceback" not in done.err
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("nostall: "), done.err
    return lines[0]
