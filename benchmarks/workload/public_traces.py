"""Public traces, and the answers of another tool about them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nostall.core.errors import BadInput


def traces_and_python(tool: str, variable: str) -> tuple[list[Path], str]:
    """The traces and the interpreter that has a tool, from variables of the environment.

    Raises BadInput if NOSTALL_PUBLIC_TRACES or the tool's variable is not set.
    """
    root, python = (os.environ.get(name) for name in ("NOSTALL_PUBLIC_TRACES", variable))
    if not root or not python:
        raise BadInput(
            f"set NOSTALL_PUBLIC_TRACES to a folder with traces and {variable} to an "
            f"interpreter with {tool}"
        )
    return sorted(Path(root).glob("*.json.gz")), python


def answer(python: str, script: str, arguments: Sequence[str]) -> dict[str, Any] | str:
    """The JSON that a script prints behind the word ANSWER; the last line of its error if none."""
    command = [python, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("ANSWER"))
    return found
