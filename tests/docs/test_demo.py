"""``make demo``: its picture shows the commands of the Makefile and what they print."""

from __future__ import annotations

import shlex
import subprocess
from xml.etree import ElementTree

import pytest

from benchmarks.front import demo

RUN = "run `python -m benchmarks page demo`"


def made_commands(target: str) -> list[list[str]]:
    """The commands of nostall that a target of the Makefile runs."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "PYTHON=true", target], cwd=demo.REPOSITORY,
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    lines = done.stdout.replace("\\\n", " ").replace(";", "\n").splitlines()
    words = [shlex.split(line) for line in lines if "/nostall " in line]
    return [["nostall", *line[1:]] for line in words]


def test_the_makefile_runs_the_commands_of_the_picture() -> None:
    made = made_commands("demo")
    assert len(made) == len(demo.steps())
    for step, words in zip(demo.steps(), made, strict=True):
        command = shlex.split(step.command)
        assert words[: len(command)] == command


def test_the_makefile_replays_a_program_that_ships() -> None:
    ((_, verb, option, path, *_),) = made_commands("run")
    assert (verb, option) == ("optimize", "--replay")
    assert (demo.REPOSITORY / path).exists()


@pytest.mark.slow
def test_the_picture_is_what_the_commands_print() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    text = demo.text()
    ElementTree.fromstring(text)
    assert demo.PICTURE.read_text("utf-8") == text, RUN


def test_a_missing_line_is_an_error() -> None:
    step = demo.Step("t", "nostall x", (r"^gain",))
    assert demo.shown_lines(step, ["a", "gain 1"]) == ["gain 1"]
    with pytest.raises(ValueError, match="prints no line"):
        demo.shown_lines(step, ["loss"])
