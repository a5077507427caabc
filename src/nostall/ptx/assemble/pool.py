"""Processes that build states in parallel."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Task = Callable[[Any, Any], T]
"""Function of a worker: (its :class:`~nostall.ptx.assemble.builder.Builder`, argument)."""

_builder: Any = None
"""Builder of a worker process."""


def worker_count() -> int:
    """Workers that leave one core to the process that measures; at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class BuildPool(Generic[T]):
    """Worker processes that each hold a builder and run ``task(builder, argument)``.

    Results do not depend on the number of workers or on the order of submission.  Ctrl-C reaches
    only the parent, which decides when to end the workers.
    """

    def __init__(self, make: Callable[[], Any], task: Task[T], workers: int | None = None) -> None:
        """``make`` makes the builder of a worker; it and ``task`` must be picklable."""
        self.workers = workers or worker_count()
        self._task = task
        self._executor = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(make,),
        )

    def submit(self, argument: Any) -> Future[T]:
        """Run the task in a worker."""
        return self._executor.submit(_run, self._task, argument)

    def submit_task(self, task: Callable[[Any, Any], Any], argument: Any) -> Future[Any]:
        """Run another task in a worker."""
        return self._executor.submit(_run, task, argument)

    def map(self, arguments: Iterable[Any]) -> list[T]:
        """Results of the task, in the order of ``arguments``."""
        return [future.result() for future in [self.submit(a) for a in arguments]]

    def start(self) -> None:
        """Start all workers; returns at once.  They take seconds, which a search would wait."""
        for _ in range(self.workers):
            self._executor.submit(_ready)

    def close(self) -> None:
        """Drop waiting tasks and end the workers when their current tasks end."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BuildPool[T]:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_worker(make: Callable[[], Any]) -> None:
    global _builder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _builder = make()


def _ready() -> None:
    """Do nothing in a worker."""


def _run(task: Callable[[Any, Any], T], argument: Any) -> T:
    return task(_builder, argument)
