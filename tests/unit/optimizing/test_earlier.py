"""Runs that are resumed: what was proven is not tried again, and only where it still holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nostall.core.errors import BadInput
from nostall.optimizing.earlier import RESULT_FILE, command_files, read_earlier
from nostall.optimizing.result import Result
from tests.unit.optimizing.test_diagnosis import facts, result


def written(folder: Path, change: Callable[[Any], None] = lambda document: None) -> Result:
    """A result in ``folder``, with one attempt that was dropped and one that was kept."""
    script = folder / "train.py"
    script.write_text("print()")
    made = result()
    made.command = ["python", str(script)]
    made.command_files = command_files(made.command)
    document = made.as_json()
    change(document)
    (folder / RESULT_FILE).write_text(json.dumps(document))
    return made


def test_attempts_are_read_back(tmp_path: Path) -> None:
    made = written(tmp_path)
    earlier = read_earlier(tmp_path, made.command, None)
    earlier.check(facts())
    found = [earlier.attempt(level) for level in made.levels if level.change]
    assert [attempt.outcome for attempt in found if attempt] == ["dropped", "kept"]
    kept = found[1]
    assert kept is not None and kept.proof == made.attempts[1].proof
    assert kept.reason == "1.2 times as fast (earlier run)"
    assert earlier.attempt(made.levels[0].__class__("new", "", None, None, "", change={})) is None


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"device": "CPU other"}, "device was CPU"),
        ({"torch": "2.11.0"}, "torch was 2.13.0"),
        ({"roots": ["Net"]}, "modules was ['GPT']"),
        ({"world": 2}, "ranks was 1"),
        ({"identity": {"model": "2" * 64}}, "the digest of its sources and parameters was {'mod"),
    ],
)
def test_another_program_or_machine_is_refused(
    other: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = written(tmp_path)
    earlier = read_earlier(tmp_path, made.command, None)
    with pytest.raises(BadInput, match="run without --resume") as error:
        earlier.check(facts(**other))
    assert reason in str(error.value)


def test_a_script_that_was_edited_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path)
    (tmp_path / "train.py").write_text("print(1)")
    with pytest.raises(BadInput, match="content of the command's files"):
        read_earlier(tmp_path, made.command, None)
    with pytest.raises(BadInput, match="the command was"):
        read_earlier(tmp_path, [*made.command, "--more"], None)


def no_gain(document: Any) -> None:
    document["attempts"][1]["proof"]["interval"] = [0.9, 1.3]


def other_schema(document: Any) -> None:
    document["schema"] = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_gain, "which its numbers do not prove"),
        (other_schema, "schema"),
        (lambda document: document.pop("attempts"), "attempts"),
        (lambda document: document.update(nostall="0.0.1"), "nostall was 0.0.1"),
    ],
)
def test_results_that_cannot_be_used_are_refused(
    change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    made = written(tmp_path, change)
    with pytest.raises(BadInput, match=reason):
        read_earlier(tmp_path, made.command, None)


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give the --out folder of an earlier run"):
        read_earlier(tmp_path, ["python"], None)
    (tmp_path / RESULT_FILE).write_text("no JSON")
    with pytest.raises(BadInput, match="is no result"):
        read_earlier(tmp_path, ["python"], None)
