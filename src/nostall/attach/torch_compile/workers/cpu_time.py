"""Processor time that compiling takes: of a thread, and of the processes that work for it.

Triton has ptxas started and waits for it; Inductor keeps processes that compile.  Accounts that
are open at the same time share what such processes take: nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PROCESSORS: int = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
_RANKS = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
COMPILERS = max(1, min(8, _PROCESSORS // _RANKS - 2))
"""Processes that compile at once for one that has something compiled; ranks of a job share a
machine, and two processors are the program's: its own thread and that of its backward passes."""

Add = Callable[[float], None]
Read = Callable[[], float]


def ended() -> float:
    """Seconds of all processes that this one has waited for, whoever started them."""
    try:
        import resource  # Windows has none
    except ImportError:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compiling() -> float:
    """Seconds of the processes that Inductor keeps for compiling, where the system tells."""
    pools = getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ())
    # Each is a process with workers of its own.
    children = [getattr(pool, "process", None) for pool in tuple(pools)]
    known = [child.pid for child in children if isinstance(child, subprocess.Popen)]
    return sum(map(tree, known))


def tree(process: int) -> float:
    """Seconds of a process, of those that it has waited for, and of its children."""
    place = Path("/proc") / str(process)
    try:
        # The name in front may have blanks.
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        spent = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        lists = [path.read_text() for path in place.glob("task/*/children")]
    except (OSError, ValueError, AttributeError):
        return 0.0
    return spent + sum(tree(int(child)) for text in lists for child in text.split())


class Shared:
    """What ``read`` counts, by those that are open meanwhile."""

    def __init__(self, read: Read) -> None:
        self._read, self._lock = read, threading.Lock()
        self._open: list[Add] = []
        self._known = 0.0

    def forget(self) -> None:
        """In a process that was forked: nobody has an account."""
        self._lock, self._open = threading.Lock(), []

    @contextlib.contextmanager
    def open(self, add: Add) -> Iterator[None]:
        """An account: ``add`` is given seconds until the end."""
        with self._lock:
            self._deal()
            self._open.append(add)
        try:
            yield
        finally:
            with self._lock:
                self._deal()
                self._open.remove(add)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is counted meanwhile belongs to nobody: it has been told otherwise."""
        with self._lock:
            self._deal()
            try:
                yield
            finally:
                self._known = self._read()

    def _deal(self) -> None:
        now = self._read()
        # A process that is gone takes its seconds along.
        spent, self._known = max(0.0, now - self._known), now
        for add in self._open:
            add(spent / len(self._open))


ENDED, COMPILING = Shared(ended), Shared(compiling)
if hasattr(os, "register_at_fork"):
    for _one in (ENDED, COMPILING):
        os.register_at_fork(after_in_child=_one.forget)


@contextlib.contextmanager
def counted(add: Add) -> Iterator[None]:
    """Processor time of this thread, and of the processes that it waits for or has compile."""
    before = time.thread_time()
    try:
        with ENDED.open(add), COMPILING.open(add):
            yield
    finally:
        add(time.thread_time() - before)
