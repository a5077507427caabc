"""Damaged files end in a result or in a clear error, through the command line.

These tests run few mutants.  ``python -m benchmarks run readers.fuzz`` runs many more; its result
is in the file that `--out` names.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nostall import cli
from tests.e2e.cli import nostall
from tests.fuzz import command_line
from tests.fuzz.command_line import (
    Outcome,
    Reader,
    arguments,
    find_problem,
    make_mutant,
    reader_named,
    run_batch,
    run_mutant,
    run_separately,
)
from tests.fuzz.readers import READERS

FIRST = 1_000_000
INPUTS = 15
"""For each reader."""
PEAK_MIB = 500


def test_damaged_files_through_the_command_line() -> None:
    reports = run_separately(list(READERS), range(FIRST, FIRST + INPUTS))
    for report in reports.values():
        assert report.failures == []
        assert set(report.outcomes) <= {"exit 0", "exit 1", "exit 2", "exit 3"}
        assert sum(report.outcomes.values()) == INPUTS
        assert report.peak_rss_mib < PEAK_MIB


@pytest.mark.parametrize("name", READERS)
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    reader = reader_named(name)
    original = reader.originals()[0]
    for file, data in {**original.companions, original.name: original.data}.items():
        (tmp_path / file).write_bytes(data)
    argv = reader.argv(tmp_path / original.name, random.Random(1))
    done = nostall(*argv, cwd=tmp_path)
    assert done.code == 0, done.err


def test_the_seed_determines_a_mutant() -> None:
    reader = reader_named("trace")
    assert make_mutant(reader, 7) == make_mutant(reader, 7)
    assert len({make_mutant(reader, seed).data for seed in range(50)}) > 40
    path = Path("t.json")
    assert arguments(reader, 7, path) == arguments(reader, 7, path)


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, main: Callable[[], None]) -> Outcome:
    """Run a mutant with ``main`` in the place of nostall's."""
    monkeypatch.setattr(cli, "main", main)
    if main is hang:
        monkeypatch.setattr(command_line, "SECONDS", 0.5)
    signal.signal(signal.SIGALRM, command_line._alarm)
    reader: Reader = reader_named("csv")
    return run_mutant(reader, make_mutant(reader, 1), folder)


def exit_with(code: int, text: bytes = b"", error: bytes = b"") -> Callable[[], None]:
    def main() -> None:
        os.write(1, text)
        os.write(2, error)
        raise SystemExit(code)

    return main


def fail() -> None:
    raise ZeroDivisionError


def hang() -> None:
    while True:
        pass


def allocate() -> None:
    bytearray(2 * command_line.MEMORY)


@pytest.mark.parametrize(
    ("main", "problem"),
    [
        (fail, "traceback: ZeroDivisionError"),
        (hang, "did not finish"),
        (allocate, "traceback: MemoryError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "exit code -9"),
        (exit_with(4), "exit code 4"),
        (exit_with(2), "without a reason"),
        (exit_with(0, b"\x1b[31m"), "escape sequence"),
        (exit_with(0, b'{"a": NaN}'), "JSON that is not valid: NaN"),
        (exit_with(0, b'{"a": 1}'), None),
        (exit_with(2, b"", b"nostall: no\n"), None),
    ],
)
def test_the_driver_reports_failures(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    main: Callable[[], None],
    problem: str | None,
) -> None:
    found = find_problem(run_main(monkeypatch, tmp_path, main))
    assert found is None if problem is None else problem in str(found)


def test_a_batch_counts_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", fail)
    report = run_batch("csv", range(3))
    assert report.outcomes == {"exit 70": 3}
    assert [failure["seed"] for failure in report.failures] == [0, 1, 2]
