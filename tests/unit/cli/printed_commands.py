"""Parse the commands that a command prints to be run next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import typer

from nostall.cli import app

GROUP: Any = typer.main.get_command(app)
PRINTED = re.compile(
    r"^(?:next|use it|or here|measure|go on): +(nostall .*?)(?:  \(.*)?$", re.MULTILINE
)
SUFFIXES = (".cubin", ".ptx", ".py", ".toml", ".json", ".safetensors")
PLACEHOLDER = "your_program.py"


def resolved(line: str) -> dict[str, Any]:
    """The parameters of a printed command line, as the command that it names gets them."""
    words = shlex.split(line)[1:]
    command, context = GROUP, GROUP.make_context("nostall", list(words))
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)
        words = [*context._protected_args, *context.args]
    return dict(context.params)


def named_files(parameters: dict[str, Any]) -> list[Path]:
    """The files and run directories that the parameters of a command name, but a placeholder."""
    texts = [
        str(value)
        for given in parameters.values()
        for value in (given if isinstance(given, list | tuple) else [given])
        if isinstance(value, str | Path)
    ]
    paths = [Path(re.sub(r"(\.py):\w+$", r"\1", text)) for text in texts]
    named = [path for path in paths if path.suffix in SUFFIXES or len(path.parts) > 1]
    return [path for path in named if str(path) != PLACEHOLDER]


def check_printed(printed: str) -> list[str]:
    """The commands that an output offers; nostall must parse them, and their files must exist."""
    lines = PRINTED.findall(printed)
    for line in lines:
        files = named_files(resolved(line))
        assert files or line.startswith("nostall apply"), line
        assert [file for file in files if not file.exists()] == [], line
    return lines
