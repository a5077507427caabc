"""Locks by which benchmark processes take turns on one GPU: each is alone when it times."""

from __future__ import annotations

import contextlib
import fcntl
import os
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
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file among all processes that lock it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
