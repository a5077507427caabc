"""CPU time of compilation: of threads, and of the processes that compile for them.

Triton starts ptxas and waits for it; Inductor keeps a pool of compile processes.  Accounts that are
open at the same time share the time of such processes, so that nothing is counted twice.
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

_CPUS: int = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
_RANKS = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
MAX_COMPILERS = max(1, min(8, _CPUS // _RANKS - 2))
"""Compile processes that may run at once.  The ranks of a job share a machine, and each needs two
CPUs itself, for its main thread and for the thread of its backward passes."""

AddSeconds = Callable[[float], None]
ReadSeconds = Callable[[], float]


def finished_children_seconds() -> float:
    """CPU seconds of all child processes that this process has waited for."""
    try:
        import resource  # not available on Windows
    except ImportError:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def inductor_pool_seconds() -> float:
    """CPU seconds of Inductor's compile processes; 0 if the system does not report them."""
    pools = getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ())
    # Each pool is a process with worker processes of its own.
    children = [getattr(pool, "process", None) for pool in tuple(pools)]
    ids = [child.pid for child in children if isinstance(child, subprocess.Popen)]
    return sum(map(process_tree_seconds, ids))


def process_tree_seconds(process: int) -> float:
    """CPU seconds of a process (by id), of its running children and of those it has waited for."""
    folder = Path("/proc") / str(process)
    try:
        # The process name, in parentheses at the beginning, may contain blanks.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children = [path.read_text() for path in folder.glob("task/*/children")]
    except (OSError, ValueError, AttributeError):
        return 0.0
    return seconds + sum(process_tree_seconds(int(id_)) for ids in children for id_ in ids.split())


class SharedCpuTime:
    """Distributes a growing number of CPU seconds equally to the accounts that are open."""

    def __init__(self, read: ReadSeconds) -> None:
        self._read, self._lock = read, threading.Lock()
        self._accounts: list[AddSeconds] = []
        self._distributed = 0.0

    def reset_after_fork(self) -> None:
        """In a forked process: close the accounts, whose threads do not exist there."""
        self._lock, self._accounts = threading.Lock(), []

    @contextlib.contextmanager
    def account(self, add: AddSeconds) -> Iterator[None]:
        """An open account: ``add`` is called with its share of the seconds."""
        with self._lock:
            self._distribute()
            self._accounts.append(add)
        try:
            yield
        finally:
            with self._lock:
                self._distribute()
                self._accounts.remove(add)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Count what is added inside for no account, because it is reported in another way."""
        with self._lock:
            self._distribute()
            try:
                yield
            finally:
                self._distributed = self._read()

    def _distribute(self) -> None:
        now = self._read()
        # The number falls when a process ends that it includes.
        seconds, self._distributed = max(0.0, now - self._distributed), now
        for add in self._accounts:
            add(seconds / len(self._accounts))


FINISHED_CHILDREN = SharedCpuTime(finished_children_seconds)
INDUCTOR_POOL = SharedCpuTime(inductor_pool_seconds)
if hasattr(os, "register_at_fork"):
    for _shared in (FINISHED_CHILDREN, INDUCTOR_POOL):
        os.register_at_fork(after_in_child=_shared.reset_after_fork)


@contextlib.contextmanager
def count_cpu_time(add: AddSeconds) -> Iterator[None]:
    """Report CPU seconds of this thread, and its share of finished children and Inductor's pool."""
    before = time.thread_time()
    try:
        with FINISHED_CHILDREN.account(add), INDUCTOR_POOL.account(add):
            yield
    finally:
        add(time.thread_time() - before)
