"""What compute-sanitizer says, as nostall reads it; the tool itself is pretended."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nostall.core import LaunchSpec, MissingPart
from nostall.gpu import Kernel, Plan, sanitizer
from nostall.gpu.sanitizer import Sanitized, sanitize

KERNEL = Kernel(b"original", "k", LaunchSpec())

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at 0x{at} in k and Read access at 0x1f0 in k
=========     and Read access at 0x{at} in k
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BAD = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at 0x{at} in k
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NOT_HERE = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to\n"


def _tool(
    monkeypatch: pytest.MonkeyPatch, answers: dict[tuple[str, bytes], tuple[int, str]]
) -> dict[str, Sanitized]:
    monkeypatch.setattr(sanitizer, "find", lambda: "compute-sanitizer")
    asked: list[tuple[str, bytes]] = []

    def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
        assert command[command.index("--error-exitcode") + 1] == "66"
        kernel, cubin, plan, ordinal = pickle.loads(Path(command[-1]).read_bytes())
        assert (kernel, plan, ordinal) == (KERNEL, Plan(seed=4), 1)
        asked.append((command[command.index("--tool") + 1], cubin))
        return answers.get(asked[-1], (0, CLEAN))

    found = dict(sanitize(KERNEL, b"changed", Plan(seed=4), 1, run))
    assert set(found) == {"memcheck", "racecheck", "synccheck"}
    return found


def test_a_clean_candidate_needs_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {s.answer for s in _tool(monkeypatch, {}).values()} == {"clean"}


def test_an_error_that_the_original_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _tool(monkeypatch, {("memcheck", b"changed"): (66, BAD.format(at="a0"))})
    assert found["memcheck"] == Sanitized("errors", "Invalid __global__ write of size 4 bytes")
    assert found["racecheck"].answer == "clean"


def test_what_the_original_shows_as_well_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    race = {
        ("racecheck", b"changed"): (66, RACE.format(at="7c0")),
        ("racecheck", b"original"): (66, RACE.format(at="9b0")),
    }
    assert _tool(monkeypatch, race)["racecheck"].answer == "as the original"
    race[("racecheck", b"original")] = (66, BAD.format(at="9b0"))
    assert _tool(monkeypatch, race)["racecheck"].answer == "errors"


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (66, NOT_HERE, "Device not supported"),
        (-1, "no end after 300 s", "no end after 300 s"),
        (1, "Traceback: cuInit", "Traceback: cuInit"),
        (3, "", "exit code 3"),
    ],
)
def test_where_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, said: str
) -> None:
    found = _tool(monkeypatch, {("synccheck", b"changed"): (code, text)})["synccheck"]
    assert found.answer == "did not run" and said in found.detail


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    exists = Path.exists
    hidden = lambda path: "sanitizer" not in path.name and exists(path)  # noqa: E731
    monkeypatch.setattr(Path, "exists", hidden)
    with pytest.raises(MissingPart, match="compute-sanitizer is not on the PATH"):
        sanitize(KERNEL, b"changed", Plan())


def test_the_child_runs_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nostall.gpu import sanitized
    from nostall.gpu.driver import Cuda
    from tests.unit.gpu.fake_driver import FakeDriver, Program
    from tests.unit.gpu.test_engine import LAUNCH, doubling

    driver = FakeDriver({b"changed": Program(doubling())})
    monkeypatch.setattr(sanitized, "Cuda", lambda ordinal: Cuda(ordinal, driver))
    file: Any = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps((Kernel(b"original", "k", LAUNCH), b"changed", Plan(), 0)))
    assert sanitized.main(file) == 0
    assert driver.launched == [b"changed"]
