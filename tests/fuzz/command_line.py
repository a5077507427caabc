"""Driver that gives damaged files to nostall's command line and judges what it does.

Exit codes 0 to 3 are allowed, each with a line that says why if it is 2 or 3; a traceback, a
signal, an escape sequence on the terminal or JSON that is not valid is a failure.
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from tests.fuzz.commands_process import MEMORY, SECONDS, Call, Outcome, run_calls
from tests.fuzz.file_mutants import FileMutation, mutate
from tests.fuzz.report import Report

GROUP = 50
"""Inputs that a child process reads."""
COMPILE_SECONDS = 600.0
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
    argv: Callable[[Mutant, random.Random], list[str]]
    """Arguments of ``nostall`` for a mutant in the folder where it starts."""
    modules: tuple[str, ...] = ()
    """Modules that its commands import.  A process imports them once; others make forks slow."""
    compiles: bool = False
    """Whether its commands compile functions at their first call, which Numba keeps on disk."""


@dataclass(frozen=True)
class Mutant:
    """A damaged input and the command that reads it."""

    seed: int
    original: str
    mutation: str
    name: str
    data: bytes
    companions: Mapping[str, bytes]


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


def arguments(reader: Reader, mutant: Mutant) -> list[str]:
    """The arguments of ``nostall`` for a mutant."""
    return reader.argv(mutant, random.Random(~mutant.seed))


def run_batch(name: str, seeds: Iterable[int]) -> Report:
    """Run the mutants of these seeds, many in one child process."""
    reader, report = reader_named(name), Report()
    with tempfile.TemporaryDirectory() as folder:
        remaining = list(seeds)
        while remaining:
            group, remaining = remaining[:GROUP], remaining[GROUP:]
            mutants = [make_mutant(reader, seed) for seed in group]
            for mutant, outcome in zip(
                mutants, run_mutants(reader, mutants, Path(folder)), strict=True
            ):
                _record(report, mutant, outcome)
    return report


def run_mutants(
    reader: Reader, mutants: Sequence[Mutant], folder: Path, limit_s: float | None = None
) -> Iterator[Outcome]:
    """Run the command of each mutant in a folder below ``folder``."""
    calls = [
        Call(
            arguments(reader, mutant),
            {**mutant.companions, mutant.name: mutant.data},
        )
        for mutant in mutants
    ]
    return run_calls(calls, folder, limit_s)


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


def run_separately(name: str, seeds: range) -> Report:
    """Run the mutants of these seeds for a reader in a fresh process.

    Such a process has little memory, which makes its forks fast.
    """
    return run_together({name: seeds})[name]


def run_together(seeds: Mapping[str, range]) -> dict[str, Report]:
    """Run the mutants of these seeds, by reader, in one fresh process."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_prepare, initargs=(tuple(seeds),)) as pool:
        return {name: pool.submit(run_batch, name, part).result() for name, part in seeds.items()}


def _prepare(names: Sequence[str]) -> None:
    """Import what the commands of the readers import, so that the children need not."""
    for name in names:
        for module in reader_named(name).modules:
            with suppress(ImportError):
                import_module(module)
        _originals(name)
    gc.freeze()
    for name in names:
        if reader_named(name).compiles:
            _compile(reader_named(name))


def _compile(reader: Reader) -> None:
    """Read sound files with a longer time limit, so that compiled functions are on the disk."""
    sound = [
        Mutant(seed, original.name, "none", original.name, original.data, original.companions)
        for seed, original in enumerate(_originals(reader.name)[:2] * 4)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for _ in run_mutants(reader, sound, Path(folder), COMPILE_SECONDS):
            pass
