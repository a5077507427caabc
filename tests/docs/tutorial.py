"""Run the commands of a tutorial page in order, in a folder of their own.

Code blocks of a page mean:

- ``{code-block} console``: lines that begin with ``$ `` are commands; the other lines are output.
  Each output line must occur in the command's output. Numbers may differ, and a line ``...`` stands
  for any lines.
- any block with ``:caption: NAME``: its text is written to the file NAME.
- ``:class: gpu``: the command needs a GPU. The test runs it on a recorded device
  (:mod:`tests.docs.replayed`).

Other blocks are for reading only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(`{3,})(.*)$")
_OPTION = re.compile(r"^:([a-z-]+): *(.*)$")
_NUMBER = re.compile(r"\d[\d,.]*(e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced code block: its language, its options and its lines."""

    language: str
    options: dict[str, str]
    lines: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        return "gpu" in self.options.get("class", "").split()


@dataclass(frozen=True)
class Command:
    """One command line and the output lines that the page shows for it."""

    line: str
    output: tuple[str, ...]
    needs_gpu: bool


@dataclass
class Tutorial:
    """A page: files to write and commands to run, in the page's order."""

    name: str
    steps: list[Command | tuple[str, str]] = field(default_factory=list)

    @property
    def commands(self) -> list[Command]:
        return [step for step in self.steps if isinstance(step, Command)]


def blocks(text: str) -> Iterator[Block]:
    lines = iter(text.splitlines())
    for line in lines:
        opening = _FENCE.match(line)
        if not opening:
            continue
        fence, info = opening.groups()
        body = []
        for inner in lines:
            if inner.startswith(fence):
                break
            body.append(inner)
        options = {}
        while body and (option := _OPTION.match(body[0])):
            options[option[1]] = option[2]
            body.pop(0)
        yield Block(info.replace("{code-block}", "").strip(), options, tuple(body))


def read(page: Path) -> Tutorial:
    tutorial = Tutorial(page.stem)
    for block in blocks(page.read_text("utf-8")):
        if "caption" in block.options:
            tutorial.steps.append((block.options["caption"], "\n".join(block.lines) + "\n"))
        elif block.language == "console":
            tutorial.steps += _commands(block)
    return tutorial


def _commands(block: Block) -> Iterator[Command]:
    line, output = "", list[str]()
    for text in (*block.lines, "$ "):
        if not text.startswith("$ "):
            output.append(text)
            continue
        if line:
            yield Command(line, tuple(output), block.needs_gpu)
        line, output = text.removeprefix("$ "), []


def run(tutorial: Tutorial, folder: Path, recording: Path | None = None) -> None:
    """Write the files and run the commands of a page in ``folder``.

    ``examples`` of the repository is linked there. Raises AssertionError if a command fails or does
    not print what the page shows.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    for step in tutorial.steps:
        if isinstance(step, tuple):
            name, text = step
            (folder / name).write_text(text)
            continue
        done = _execute(step, folder, recording)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{tutorial.name}: {step.line}\n{output}"
        missing = [line for line in step.output if not _occurs(line, output)]
        assert not missing, f"{tutorial.name}: {step.line} does not print {missing}\n{output}"


def _execute(
    command: Command, folder: Path, recording: Path | None
) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command.line)
    if words[0] == "nostall":
        module = ["-m", "nostall"]
        if command.needs_gpu:
            assert recording is not None, f"no recording for {command.line}"
            module = ["-m", "tests.docs.replayed", str(recording)]
        words = [sys.executable, *module, *words[1:]]
    elif words[0] == "python":
        words[0] = sys.executable
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "NOSTALL_HOME": str(folder / "store"),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def _occurs(line: str, output: str) -> bool:
    wanted = _shape(line)
    return wanted in ("", "...") or any(wanted in _shape(text) for text in output.splitlines())


def _shape(line: str) -> str:
    """A line without its numbers and with single blanks."""
    return " ".join(_NUMBER.sub("#", line).split())
