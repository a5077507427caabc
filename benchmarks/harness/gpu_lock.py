"""Locks by which benchmark processes take turns on one GPU: each is alone when it times."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_VARIABLE = "NOSTALL_BENCHMARK_GPU_LOCK"
"""Environment variable with the path of the lock file; without it nothing is locked."""
PAUSE_SECONDS = 2e-3
"""Pause behind each turn, so that a process that waits gets the next one."""


@contextlib.contextmanager
def gpu_turn() -> Iterator[None]:
    """Hold the lock; the caller ends its work on the GPU before the context ends."""
    path = os.environ.get(LOCK_VARIABLE)
    if not path:
        yield
        return
    with locked(Path(path)):
        yield
    time.sleep(PAUSE_SECONDS)


@contextlib.contextmanager
def quiet_turn() -> Iterator[None]:
    """Hold the lock while the other workers of this benchmark and their children are stopped.

    They compile on the same processor and run kernels of their own, which a loop of short steps
    shows.  For work that needs no file lock of theirs: the caller times and does not compile.
    """
    with gpu_turn():
        stopped = _others() if os.environ.get(LOCK_VARIABLE) else []
        try:
            _signal(stopped, signal.SIGSTOP)
            yield
        finally:
            _signal(stopped, signal.SIGCONT)


def _others() -> list[int]:
    """Descendants of this worker's parent, without this process and its own."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    waiting, found = list(children.get(os.getppid(), ())), list[int]()
    while waiting:
        process = waiting.pop()
        if process != os.getpid():
            found.append(process)
            waiting += children.get(process, ())
    return found


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(process, number)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file among all processes that lock it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
