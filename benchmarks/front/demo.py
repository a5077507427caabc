"""``make demo`` as a picture: its three commands, and the lines of their output that matter.

``python -m benchmarks page demo`` runs the commands and writes ``docs/pictures/demo.svg``; it needs
PyTorch and Triton, no GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.front.picture import FOLDER
from benchmarks.harness.result_file import ROOT
from nostall.core.files.atomic import write_atomically

REPOSITORY = ROOT.parent
PICTURE = FOLDER / "demo.svg"
COLUMNS = 110
RECORDED = ("batched_gemm", "gemm_leakyrelu")
"""Kernels whose recorded search is replayed: the first one that has a recording, as in Makefile."""
WIDTH, LINE, MARGIN = 860, 18, 18
PAPER, INK, SOFT, PROMPT, FOUND = "#0d1117", "#e6edf3", "#9198a1", "#58a6ff", "#7ee787"


@dataclass(frozen=True)
class Step:
    """A command of the demonstration."""

    title: str
    command: str
    shown: tuple[str, ...]
    """Patterns of the lines that are shown, in the order of the output; the first is marked."""


def recorded_command() -> str:
    """The command that replays a recorded search, without its output folder."""
    folder = REPOSITORY / "examples" / "recordings"
    for kernel in RECORDED:
        if found := sorted(folder.glob(f"{kernel}*.sm_90.json")):
            name = found[0].name.removesuffix(".sm_90.json")
            return f"nostall tune examples/{kernel}.py:{name} --arch sm_90 --objective recorded"
    raise FileNotFoundError(f"{folder} has no recording of {' or '.join(RECORDED)}")


def steps() -> tuple[Step, ...]:
    """The three commands."""
    return (
        Step(
            "1. It finds: a training step on an H200, from torch.profiler's trace",
            "nostall characterize tests/unit/workload/h200/gpt.json.gz",
            (r"chains of memory-bound", r"^what to fix first"),
        ),
        Step(
            "2. It removes: operators of a PyTorch function become one kernel (modelled times)",
            "nostall fuse examples/fusion/layernorm_gelu.py:layernorm_gelu",
            (r"^inference: ", r"^  unfused", r"^  greedy", r"^  explore", r"^verifier: "),
        ),
        Step(
            "3. It proves: a search that an H200 measured; its winner is verified again here",
            recorded_command(),
            (r"^gain ", r"^interval: ", r"^medians: ", r"^verifier: ", r"^outputs: "),
        ),
    )


def run(command: str) -> list[str]:
    """The lines that a command prints on 110 columns."""
    words = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        if words[1] in ("fuse", "tune"):
            words += ["--out", f"{folder}/run"]
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=REPOSITORY, text=True, check=True,
            capture_output=True,
            env={**os.environ, "COLUMNS": str(COLUMNS), "NOSTALL_HOME": f"{folder}/store"},
        )  # fmt: skip
    return done.stdout.splitlines()


def shown_lines(step: Step, output: Sequence[str]) -> list[str]:
    """The lines of a step's output that the picture shows; raises ValueError if one is missing."""
    for pattern in step.shown:
        if not any(re.search(pattern, line) for line in output):
            raise ValueError(f"`{step.command}` prints no line {pattern!r}")
    return [line for line in output if any(re.search(p, line) for p in step.shown)]


def draw(parts: Sequence[tuple[Step, Sequence[str]]]) -> str:
    """The SVG text."""
    texts = [text for step, lines in parts for text in _part(step, lines)]
    height = 2 * MARGIN + LINE * len(texts)
    label = "make demo: " + "; ".join(step.title for step, _ in parts)
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (number + 1) - 5}" fill="{colour}"{bold} '
        f'xml:space="preserve">{escape(text)}</text>\n'
        for number, (text, colour, bold) in enumerate(texts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(label)}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12.5">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>\n{"".join(rows)}</svg>\n'
    )


def _part(step: Step, lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    yield step.title, SOFT, ""
    yield f"$ {step.command}", PROMPT, ""
    for line in lines:
        is_found = re.search(step.shown[0], line) is not None
        for part in textwrap.wrap(_cut(line), COLUMNS, subsequent_indent=" " * 10):
            yield part, FOUND if is_found else INK, ' font-weight="700"' if is_found else ""
    yield "", INK, ""


def _cut(line: str) -> str:
    """A line without the details in parentheses that depend on this machine's Triton."""
    return re.sub(r"(\(PTX proved equal; ).*?(\d+ native)", r"\1\2", line)


def text() -> str:
    """The picture of what the commands print here."""
    return draw([(step, shown_lines(step, run(step.command))) for step in steps()])


def write() -> None:
    """Run the commands and write the picture."""
    write_atomically(PICTURE, text().encode())
