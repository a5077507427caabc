"""Run the commands of a page in order, in a folder of their own, and compare what they print.

All commands of a tutorial run. Of README and other pages those run whose output is quoted.

Code blocks of a page mean:

- ``{code-block} console``: lines that begin with ``$ `` are commands; the other lines are output.
  Each output line must occur in the command's output, and ``...`` stands for any text of a line, or
  as a line of its own for any lines. A plain ``console`` block means the same.
- ``:class: varying``: numbers may differ, because the command measures the machine it runs on.
- any block with ``:caption: NAME``: its text is written to the file NAME.
- ``:class: gpu``: the command needs a GPU. The test runs ``nostall tune`` and ``nostall bench``
  on a recorded device (:mod:`tests.docs.replayed`), and compares the recorded output of all GPU
  commands with the page. Without a recording of the page it does neither.

A command is a program and its arguments, or two of them with a pipe. ``examples`` and ``tests`` of
the repository are there under the same relative paths as in a clone. Other blocks are for reading
only.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.docs.recording import GpuCommand, PageRecording, rules_hash

ROOT = Path(__file__).resolve().parents[2]
REPLAYED = ("nostall tune", "nostall bench")
"""Beginnings of commands that measure only through :class:`nostall.gpu.LocalGpu`."""
_FENCE = re.compile(r"^(`{3,})(.*)$")
_NUMBER = re.compile(r"\d[\d,.]*(e[+-]?\d+)?")
_OPTION = re.compile(r"^:([a-z-]+): *(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced code block: its language, its options and its lines."""

    language: str
    options: dict[str, str]
    lines: tuple[str, ...]

    @property
    def needs_gpu(self) -> bool:
        return "gpu" in self.options.get("class", "").split()

    @property
    def varying(self) -> bool:
        return "varying" in self.options.get("class", "").split()


@dataclass(frozen=True)
class Command:
    """One command line and the output lines that the page shows for it."""

    line: str
    output: tuple[str, ...]
    needs_gpu: bool
    varying: bool = False
    """Whether the numbers of the output may differ."""

    @property
    def is_replayed(self) -> bool:
        """Whether the command runs on recorded measurements in the tests."""
        return self.needs_gpu and self.line.startswith(REPLAYED)


@dataclass
class Tutorial:
    """A page: files to write and commands to run, in the page's order."""

    name: str
    steps: list[Command | tuple[str, str]] = field(default_factory=list)

    @property
    def commands(self) -> list[Command]:
        return [step for step in self.steps if isinstance(step, Command)]

    @property
    def gpu_commands(self) -> list[Command]:
        return [command for command in self.commands if command.needs_gpu]

    @property
    def files(self) -> dict[str, str]:
        """Text of the files that the page writes, by name."""
        return dict(step for step in self.steps if isinstance(step, tuple))


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
    """The steps of a tutorial."""
    tutorial = Tutorial(page.stem)
    for block in blocks(page.read_text("utf-8")):
        if "caption" in block.options:
            tutorial.steps.append((block.options["caption"], "\n".join(block.lines) + "\n"))
        elif block.language == "console":
            tutorial.steps += _commands(block)
    return tutorial


def read_quotations(page: Path) -> Tutorial:
    """The commands of another page whose output it quotes; the other commands are not run."""
    steps = read(page).steps
    quoted = [step for step in steps if isinstance(step, Command) and step.output]
    return Tutorial(page.stem, list(quoted))


def _commands(block: Block) -> Iterator[Command]:
    line, output = "", list[str]()
    for text in (*block.lines, "$ "):
        if not text.startswith("$ "):
            output.append(text)
            continue
        if line:
            yield Command(line, tuple(output), block.needs_gpu, block.varying)
        line, output = text.removeprefix("$ "), []


def run(tutorial: Tutorial, folder: Path, recording: PageRecording | None = None) -> list[Command]:
    """Write the files and run the commands of a page in ``folder``.

    Those of :data:`REPLAYED` among the GPU commands run on the recorded measurements. The recorded
    output of each GPU command is compared with the page. Returns the GPU commands that did not run
    although they could be replayed, because there is no recording, or because it is of other rules
    of the verifier. Raises AssertionError if a command fails or does not print what the page shows.
    """
    prepare(folder)
    remaining = iter(recording.commands if recording else ())
    skipped: list[Command] = []
    for step in tutorial.steps:
        if isinstance(step, tuple):
            name, text = step
            (folder / name).write_text(text)
            continue
        recorded: GpuCommand | None = None
        if step.needs_gpu:
            if recording is None:
                skipped.append(step)
                continue
            recorded = next(remaining, None)
            assert recorded is not None and recorded.line == step.line, (
                f"{tutorial.name}: the recording lacks {step.line}; record again"
            )
            _check(tutorial, step, recorded.returncode, recorded.output)
            if not step.is_replayed:
                continue
            if recording.rules != rules_hash():
                skipped.append(step)
                continue
        done = execute(step.line, folder, _replaying(recorded, folder) if recorded else None)
        _check(tutorial, step, done.returncode, done.stdout + done.stderr)
    return skipped


def prepare(folder: Path) -> None:
    """Link the folders of the repository that tutorials read."""
    for name in ("examples", "tests"):
        (folder / name).symlink_to(ROOT / name)


def execute(
    line: str, folder: Path, launcher: list[str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command line, without a shell; ``|`` passes the output on to a second program.

    ``launcher`` are the arguments of Python that run nostall, by default ``-m nostall``. Raises
    subprocess.TimeoutExpired if a program takes longer than ``timeout`` seconds.
    """
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *([inherited] if inherited else [])])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
        "NOSTALL_HOME": str(folder / "store"),
        "COLUMNS": "88",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.CompletedProcess[str]([], 0, "", "")
    errors = ""
    for part in line.split(" | "):
        words = shlex.split(part)
        if words[0] == "nostall":
            words = ["python", *(launcher or ["-m", "nostall"]), *words[1:]]
        words = [sys.executable if word == "python" else word for word in words]
        done = _run(words, folder, environment, done.stdout, timeout)
        errors += done.stderr
        if done.returncode:
            break
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, errors)


def _run(
    words: list[str], folder: Path, environment: dict[str, str], text: str, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program; on a timeout its child processes end, too, and TimeoutExpired is raised."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(text, timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise subprocess.TimeoutExpired(words, timeout, output, errors) from None
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def with_any_triton(step: Command | tuple[str, str]) -> Command | tuple[str, str]:
    """The step, with any numbers allowed in the output of a command without a GPU.

    The pages quote what the pinned Triton makes; kernels of another release differ.
    """
    if isinstance(step, Command) and not step.needs_gpu:
        return replace(step, varying=True)
    return step


def missing_lines(command: Command, output: str) -> list[str]:
    """The output lines of the page that ``output`` lacks."""
    shape = _shape if command.varying else _single_blanks
    printed = [shape(text) for text in output.splitlines()]

    def is_printed(line: str) -> bool:
        wanted = ".*".join(re.escape(part) for part in shape(line).split("..."))
        return any(re.search(wanted, text) for text in (*printed, ""))

    return [line for line in command.output if not is_printed(line)]


def _check(tutorial: Tutorial, command: Command, returncode: int, output: str) -> None:
    assert returncode == 0, f"{tutorial.name}: {command.line}\n{output}"
    missing = missing_lines(command, output)
    assert not missing, f"{tutorial.name}: {command.line} does not print {missing}\n{output}"


def _replaying(recorded: GpuCommand, folder: Path) -> list[str]:
    """Arguments of Python that run nostall with the recorded devices."""
    path = folder / "replayed-devices.json"
    path.write_text(recorded.model_dump_json())
    return ["-m", "tests.docs.replayed", "replay", str(path)]


def _single_blanks(line: str) -> str:
    return " ".join(line.split())


def _shape(line: str) -> str:
    """A line without its numbers and with single blanks."""
    return _single_blanks(_NUMBER.sub("#", line))
