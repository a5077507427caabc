"""Driver that gives damaged files to nostall's command line, one process for each file.

A process that has imported nostall forks for each input, and the child runs ``nostall.cli.main``
with limits on memory, time and file sizes.  Exit codes 0 to 3 are allowed, each with a line that
says why if it is 2 or 3; a traceback, a signal, an escape sequence on the terminal or JSON that is
not valid is a failure.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.fuzz.file_mutants import FileMutation, mutate
from tests.fuzz.report import Report

MEMORY = 2 << 30
"""Bytes that a command may allocate in addition to the interpreter's own."""
SECONDS = 20.0
"""Time limit of a command."""
_MAX_WRITTEN = 64 << 20
"""Bytes of the largest file that a command may write."""
_COMMANDS = (
    *("nostall.cli.characterize", "nostall.report.workload", "pyarrow.parquet"),
    *("nostall.cli.plan", "nostall.cli.simulate", "nostall.cli.launch", "nostall.cli.inspect"),
    *("nostall.cli.tune", "nostall.cli.store", "nostall.sass.game.ppo_search"),
)
"""Modules that the commands import."""
ALLOWED_CODES = frozenset({0, 1, 2, 3})


@dataclass(frozen=True)
class Original:
    """A sound input."""

    name: str
    """File name; its suffix is that of the mutants."""
    data: bytes
    companions: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Other files that the command needs, by name; they are not damaged."""


@dataclass(frozen=True)
class Reader:
    """A reader of files behind a command: where its inputs come from, and how it is called."""

    name: str
    originals: Callable[[], Sequence[Original]]
    mutations: Sequence[FileMutation]
    argv: Callable[[Path, random.Random], list[str]]
    """Arguments of ``nostall`` for the damaged file at a path."""


@dataclass(frozen=True)
class Mutant:
    """A damaged input and the command that reads it."""

    seed: int
    original: str
    mutation: str
    name: str
    data: bytes
    companions: Mapping[str, bytes]


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    rss_mib: float
    stdout: bytes
    stderr: bytes


class _CommandTimeout(BaseException):
    """A command exceeded its time limit."""


@lru_cache
def _originals(reader: str) -> Sequence[Original]:
    return reader_named(reader).originals()


def reader_named(name: str) -> Reader:
    """The reader of the table :data:`tests.fuzz.readers.READERS`."""
    from tests.fuzz.readers import READERS

    return READERS[name]


def make_mutant(reader: Reader, seed: int) -> Mutant:
    """The mutant of a seed."""
    rng = random.Random(seed)
    original = rng.choice(_originals(reader.name))
    mutation, data = mutate(original.data, reader.mutations, rng)
    return Mutant(seed, original.name, mutation, original.name, data, original.companions)


def arguments(reader: Reader, seed: int, path: Path) -> list[str]:
    """The arguments of ``nostall`` for the mutant of a seed."""
    return reader.argv(path, random.Random(~seed))


def run_batch(name: str, seeds: Iterable[int]) -> Report:
    """Run the mutants of these seeds, each in a child process of this one."""
    reader = reader_named(name)
    report = Report()
    previous = signal.signal(signal.SIGALRM, _alarm)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in seeds:
                mutant = make_mutant(reader, seed)
                place = Path(folder) / str(seed)
                place.mkdir()
                _record(report, mutant, run_mutant(reader, mutant, place))
                shutil.rmtree(place)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return report


def run_mutant(reader: Reader, mutant: Mutant, folder: Path) -> Outcome:
    """Write a mutant to ``folder`` and run its command there."""
    for name, data in {**mutant.companions, mutant.name: mutant.data}.items():
        (folder / name).write_bytes(data)
    argv = arguments(reader, mutant.seed, folder / mutant.name)
    stdout, stderr = folder / ".stdout", folder / ".stderr"
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        _run_child(argv, folder, stdout, stderr)
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _, status, usage = os.wait4(pid, 0)
    except _CommandTimeout:
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        seconds=time.perf_counter() - start,
        rss_mib=usage.ru_maxrss / 1024,
        stdout=stdout.read_bytes(),
        stderr=stderr.read_bytes(),
    )


def _run_child(argv: list[str], folder: Path, stdout: Path, stderr: Path) -> NoReturn:
    code = 70
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for descriptor, target in ((0, os.devnull), (1, stdout), (2, stderr)):
            flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(target, flags, 0o600), descriptor)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        os.environ.update(COLUMNS="80", NOSTALL_HOME=str(folder / ".store"), NO_COLOR="1")
        os.chdir(folder)
        _limit_resources()
        code = _run_main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _limit_resources() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_WRITTEN, _MAX_WRITTEN))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_main(argv: list[str]) -> int:
    from nostall.cli import main

    sys.argv = ["nostall", *argv]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _record(report: Report, mutant: Mutant, outcome: Outcome) -> None:
    for mutation in mutant.mutation.split("+"):
        report.kinds[mutation] += 1
    report.outcomes[f"exit {outcome.code}"] += 1
    report.peak_rss_mib = max(report.peak_rss_mib, outcome.rss_mib)
    if outcome.seconds > report.slowest["seconds"]:
        report.slowest = {
            "seconds": round(outcome.seconds, 3),
            "seed": mutant.seed,
            "of": mutant.original,
            "how": mutant.mutation,
        }
    if (problem := find_problem(outcome)) is not None:
        report.fail(mutant, problem)


def find_problem(outcome: Outcome) -> str | None:
    """Why an outcome is a failure; None if it is not."""
    stderr = outcome.stderr.decode(errors="replace")
    last = (stderr.strip().splitlines() or [""])[-1][-300:]
    if outcome.seconds >= SECONDS:
        return f"did not finish within {SECONDS:g} s"
    if "Traceback" in stderr:
        return f"traceback: {last}"
    if outcome.code not in ALLOWED_CODES:
        return f"exit code {outcome.code}: {last}"
    if outcome.code in (2, 3) and not last.strip():
        return f"exit code {outcome.code} without a reason"
    if outcome.rss_mib > MEMORY / 2**20:
        return f"used {outcome.rss_mib:.0f} MiB"
    if b"\x1b" in outcome.stdout + outcome.stderr:
        return "wrote an escape sequence to the terminal"
    if outcome.code == 0 and outcome.stdout.startswith((b"{", b"[")):
        try:
            json.loads(outcome.stdout, parse_constant=_refuse)
        except ValueError as error:
            return f"wrote JSON that is not valid: {error}"
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _alarm(signum: int, frame: FrameType | None) -> None:
    raise _CommandTimeout


def run_separately(names: Sequence[str], seeds: range) -> dict[str, Report]:
    """Run the mutants of these seeds for each reader in a fresh process.

    Such a process has little memory, which makes its forks fast.
    """
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_import_commands) as pool:
        return {name: pool.submit(run_batch, name, seeds).result() for name in names}


def _import_commands() -> None:
    """Import the commands once, so that the children need not."""
    for module in _COMMANDS:
        with suppress(ImportError):
            import_module(module)
    gc.freeze()
