"""A child process that runs nostall's command line for one input after the other, with limits.

The child is a fork of a process that has imported the commands.  It calls ``nostall.cli.main`` for
each of its inputs and sends what came of it through a pipe.  The parent kills it if an input takes
too long, and starts another one behind an input that ended it.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

MEMORY = 2 << 30
"""Bytes that a command may allocate in addition to the interpreter's own."""
SECONDS = 20.0
"""Time limit of a command."""
_MAX_WRITTEN = 64 << 20
"""Bytes of the largest file that a command may write."""


@dataclass(frozen=True)
class Call:
    """Arguments of ``nostall``, and the files of the folder that it starts in."""

    argv: Sequence[str]
    files: dict[str, bytes]


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    rss_mib: float
    stdout: bytes
    stderr: bytes


def run_calls(
    calls: Sequence[Call], folder: Path, limit_s: float | None = None
) -> Iterator[Outcome]:
    """Run commands below ``folder``, each in an empty folder; yields one outcome each.

    The time limit of a command is :data:`SECONDS` by default.
    """
    done = 0
    while done < len(calls):
        for outcome in _run_in_child(calls[done:], folder, limit_s or SECONDS):
            done += 1
            yield outcome


def _run_in_child(calls: Sequence[Call], folder: Path, limit_s: float) -> Iterator[Outcome]:
    """Outcomes of the calls up to the one that ended the child, which may be the last."""
    receive, send = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        receive.close()
        _run_as_child(calls, folder, send)
    send.close()
    is_running = True
    try:
        for _ in calls:
            start = time.perf_counter()
            if receive.poll(limit_s):
                try:
                    yield receive.recv()
                    continue
                except EOFError:
                    pass
            else:
                os.kill(pid, 9)
            _, status, usage = os.wait4(pid, 0)
            is_running = False
            yield Outcome(
                code=os.waitstatus_to_exitcode(status),
                seconds=time.perf_counter() - start,
                rss_mib=usage.ru_maxrss / 1024,
                stdout=_read(folder, 1),
                stderr=_read(folder, 2),
            )
            return
    finally:
        receive.close()
        if is_running:
            os.waitpid(pid, 0)


def _run_as_child(calls: Sequence[Call], folder: Path, send: Connection) -> NoReturn:
    try:
        _limit_resources()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(COLUMNS="80", NO_COLOR="1", NOSTALL_HOME=str(folder / "work" / ".store"))
        for call in calls:
            send.send(_run(call, folder))
    finally:
        os._exit(70)


def _run(call: Call, folder: Path) -> Outcome:
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name, data in call.files.items():
        (work / name).write_bytes(data)
    os.chdir(work)
    _redirect(folder)
    start = time.perf_counter()
    code = 70
    try:
        code = _run_main(call.argv)
    except BaseException:
        traceback.print_exc()
    seconds = time.perf_counter() - start
    sys.stdout.flush()
    sys.stderr.flush()
    users = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN  # the disassembler is a child
    peak = max(resource.getrusage(user).ru_maxrss for user in users)
    return Outcome(code, seconds, peak / 1024, _read(folder, 1), _read(folder, 2))


def _redirect(folder: Path) -> None:
    """Let the standard output and error of this process be files."""
    for descriptor in (1, 2):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        file = os.open(folder / f"output{descriptor}", flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115


def _read(folder: Path, descriptor: int) -> bytes:
    path = folder / f"output{descriptor}"
    return path.read_bytes() if path.exists() else b""


def _limit_resources() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_WRITTEN, _MAX_WRITTEN))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_main(argv: Sequence[str]) -> int:
    from nostall.cli import main

    sys.argv = ["nostall", *argv]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
