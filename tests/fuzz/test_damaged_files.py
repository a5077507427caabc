"""Damaged files end in a result or in a clear error, through the command line.

These tests run few mutants.  ``python -m benchmarks run readers.fuzz`` runs many more; its results
are in ``benchmarks/readers/results/fuzz``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from nostall import cli
from tests.e2e.cli import nostall, nostall_here
from tests.fuzz import commands_process
from tests.fuzz.command_line import (
    Mutant,
    arguments,
    find_problem,
    make_mutant,
    reader_named,
    run_batch,
    run_mutants,
    run_together,
)
from tests.fuzz.commands_process import Outcome
from tests.fuzz.readers import READERS

FIRST = 1_000_000
INPUTS, FEW_INPUTS = 10, 3
"""For each reader; few for those whose command disassembles a kernel."""
KERNEL_READERS = ("launch", "policy", "bundle", "fatbin")
PEAK_MIB = 700
NEEDS_TORCH = ("policy",)


def usable_readers() -> list[str]:
    """The readers whose packages are installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return [name for name in READERS if name not in NEEDS_TORCH]
    return list(READERS)


@pytest.mark.slow
def test_damaged_files_through_the_command_line() -> None:
    counts = {name: FEW_INPUTS if name in KERNEL_READERS else INPUTS for name in usable_readers()}
    seeds = {name: range(FIRST, FIRST + count) for name, count in counts.items()}
    for name, report in run_together(seeds).items():
        assert report.failures == []
        assert set(report.outcomes) <= {"exit 0", "exit 1", "exit 2", "exit 3"}
        assert sum(report.outcomes.values()) == counts[name]
        assert report.peak_rss_mib < PEAK_MIB


def sound_input(name: str, number: int = 0) -> Mutant:
    """An original of a reader as if it were a mutant, so that its command can be run."""
    original = reader_named(name).originals()[number]
    return Mutant(2, original.name, "none", original.name, original.data, original.companions)


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("policy", "bundle")])
def test_sound_files_are_read(name: str, tmp_path: Path) -> None:
    """Policies and bundles are searched with and imported in other tests."""
    mutant = sound_input(name)
    for file, data in {**mutant.companions, mutant.name: mutant.data}.items():
        (tmp_path / file).write_bytes(data)
    argv = arguments(reader_named(name), mutant)
    home = str(tmp_path / ".store")
    done = nostall_here(*argv, cwd=tmp_path, NOSTALL_HOME=home)
    is_refused = name == "fatbin" and done.code == 2  # it holds several kernels
    assert done.code == 0 or is_refused, (argv, done.err)


def test_the_driver_does_what_a_process_does(tmp_path: Path) -> None:
    """Exit code and messages of inputs are the same in a process of their own."""
    for name, seed in (("csv", 3), ("plan", 4)):
        mutants = [make_mutant(reader_named(name), seed)]
        driven = list(run_mutants(reader_named(name), mutants, tmp_path))
        for mutant, outcome in zip(mutants, driven, strict=True):
            folder = tmp_path / f"{name} {mutant.seed}"
            folder.mkdir()
            for file, data in {**mutant.companions, mutant.name: mutant.data}.items():
                (folder / file).write_bytes(data)
            argv = arguments(reader_named(name), mutant)
            done = nostall(*argv, cwd=folder, COLUMNS="80", NO_COLOR="1")
            assert (done.code, done.err) == (outcome.code, outcome.stderr.decode())


@pytest.mark.slow
def test_the_seed_determines_a_mutant() -> None:
    reader = reader_named("trace")
    assert make_mutant(reader, 7) == make_mutant(reader, 7)
    assert len({make_mutant(reader, seed).data for seed in range(20)}) > 15
    assert arguments(reader, make_mutant(reader, 7)) == arguments(reader, make_mutant(reader, 7))


def run_main(monkeypatch: pytest.MonkeyPatch, folder: Path, main: Callable[[], None]) -> Outcome:
    """Run a mutant with ``main`` in the place of nostall's."""
    monkeypatch.setattr(cli, "main", main)
    if main is hang:
        monkeypatch.setattr(commands_process, "SECONDS", 0.5)
    reader = reader_named("csv")
    (outcome,) = run_mutants(reader, [make_mutant(reader, 1)], folder)
    return outcome


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
    bytearray(2 * commands_process.MEMORY)


@pytest.mark.parametrize(
    ("main", "problem"),
    [
        (fail, "traceback: ZeroDivisionError"),
        (hang, "exit code -9"),
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


def test_the_inputs_behind_one_that_ends_the_process_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes = iter((0, None, 3))

    def main() -> None:
        code = next(codes)
        if code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(code)

    monkeypatch.setattr(cli, "main", main)
    reader = reader_named("csv")
    mutants = [make_mutant(reader, seed) for seed in range(3)]
    outcomes = list(run_mutants(reader, mutants, tmp_path))
    assert [outcome.code for outcome in outcomes][:2] == [0, -signal.SIGKILL]
    assert len(outcomes) == 3
