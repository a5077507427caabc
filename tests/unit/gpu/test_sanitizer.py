"""Reports of compute-sanitizer, with fake outputs of the tool."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nostall.core import LaunchSpec, MissingPart
from nostall.gpu import Kernel, MeasurementPlan, sanitizer
from nostall.gpu.sanitizer import SanitizerReport, sanitize

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
UNSUPPORTED = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to
"""


def _sanitize(
    monkeypatch: pytest.MonkeyPatch, outputs: dict[tuple[str, bytes], tuple[int, str]]
) -> dict[str, SanitizerReport]:
    """Sanitize the candidate ``b"changed"``; ``outputs`` are by tool and cubin (default: clean)."""
    monkeypatch.setattr(sanitizer, "find", lambda: "compute-sanitizer")
    calls: list[tuple[str, bytes]] = []

    def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
        assert command[command.index("--error-exitcode") + 1] == "66"
        kernel, cubin, plan, ordinal = pickle.loads(Path(command[-1]).read_bytes())
        assert (kernel, plan, ordinal) == (KERNEL, MeasurementPlan(seed=4), 1)
        calls.append((command[command.index("--tool") + 1], cubin))
        return outputs.get(calls[-1], (0, CLEAN))

    reports = dict(sanitize(KERNEL, b"changed", MeasurementPlan(seed=4), 1, run))
    assert set(reports) == {"memcheck", "racecheck", "synccheck"}
    return reports


def test_a_clean_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {s.answer for s in _sanitize(monkeypatch, {}).values()} == {"clean"}


def test_an_error_that_the_original_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = _sanitize(monkeypatch, {("memcheck", b"changed"): (66, BAD.format(at="a0"))})
    message = "Invalid __global__ write of size 4 bytes"
    assert reports["memcheck"] == SanitizerReport("errors", message)
    assert reports["racecheck"].answer == "clean"


def test_errors_of_the_original_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    race = {
        ("racecheck", b"changed"): (66, RACE.format(at="7c0")),
        ("racecheck", b"original"): (66, RACE.format(at="9b0")),
    }
    assert _sanitize(monkeypatch, race)["racecheck"].answer == "as the original"
    race[("racecheck", b"original")] = (66, BAD.format(at="9b0"))
    assert _sanitize(monkeypatch, race)["racecheck"].answer == "errors"


@pytest.mark.parametrize(
    ("code", "output", "message"),
    [
        (66, UNSUPPORTED, "Device not supported"),
        (-1, "it did not end within 300 s", "it did not end within 300 s"),
        (1, "Traceback: cuInit", "Traceback: cuInit"),
        (3, "", "exit code 3"),
    ],
)
def test_a_tool_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, message: str
) -> None:
    report = _sanitize(monkeypatch, {("synccheck", b"changed"): (code, output)})["synccheck"]
    assert report.answer == "did not run" and message in report.detail


def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    exists = Path.exists
    hidden = lambda path: "sanitizer" not in path.name and exists(path)  # noqa: E731
    monkeypatch.setattr(Path, "exists", hidden)
    with pytest.raises(MissingPart, match="compute-sanitizer is not on the PATH"):
        sanitize(KERNEL, b"changed", MeasurementPlan())


def test_the_target_program_launches_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nostall.gpu import sanitizer_target
    from nostall.gpu.driver import Cuda
    from tests.unit.gpu.evaluator.test_engine import LAUNCH, doubling
    from tests.unit.gpu.fake_driver import FakeDriver, Program

    driver = FakeDriver({b"changed": Program(doubling())})
    monkeypatch.setattr(sanitizer_target, "Cuda", lambda ordinal: Cuda(ordinal, driver))
    file: Any = tmp_path / "x.pickle"
    kernel = Kernel(b"original", "k", LAUNCH)
    file.write_bytes(pickle.dumps((kernel, b"changed", MeasurementPlan(), 0)))
    assert sanitizer_target.main(file) == 0
    assert driver.launched == [b"changed"]
