"""One process per GPU: a queue of jobs each, and one place where the answers come together."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

J = TypeVar("J")
R = TypeVar("R")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLACK = 120.0
"""Seconds beyond what is expected, times three, after which a job counts as hung."""


def visible() -> list[str]:
    """The GPUs that this process may use, as CUDA names them; empty without a driver."""
    given = os.environ.get(_VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def dealt(
    items: Sequence[J], gpus: int, of: Callable[[J], str], names: Sequence[str]
) -> list[list[J]]:
    """``items`` as one queue per GPU, in their order.

    Those of one name (``of`` says which) share a GPU, the same one whenever ``names`` is the same.
    """
    place = {name: number % gpus for number, name in enumerate(names)}
    return [[item for item in items if place[of(item)] == gpu] for gpu in range(gpus)]


@dataclass(frozen=True)
class Answer(Generic[J, R]):
    """What became of a job: a result, or the error that it ended with."""

    job: J
    result: R | None
    error: Exception | None = None


def spread(
    function: Callable[[J], R],
    queues: Sequence[Sequence[J]],
    gpus: Sequence[str],
    until: float,
    expected: Callable[[J], float],
) -> Iterator[Answer[J, R]]:
    """Run each queue on its GPU, one job after the other; answers as they come.

    A job begins only when it is ``expected`` to end (in seconds) before ``until`` (of the monotonic
    clock).  A worker that dies or hangs costs its job; the next one gets a new worker.
    """
    answers: queue.SimpleQueue[Answer[J, R] | None] = queue.SimpleQueue()

    def serve(gpu: str, jobs: Sequence[J]) -> None:
        worker = _Worker(gpu)
        try:
            for job in jobs:
                seconds = expected(job)
                if monotonic() + seconds > until:
                    break
                try:
                    answers.put(Answer(job, worker.call(function, job, 3 * seconds + _SLACK)))
                except Exception as error:  # whatever a job raises is its answer
                    answers.put(Answer(job, None, error))
        finally:
            worker.close()
            answers.put(None)

    threads = [
        threading.Thread(target=serve, args=pair, daemon=True)
        for pair in zip(gpus, queues, strict=True)
    ]
    for thread in threads:
        thread.start()
    left = len(threads)
    while left:
        answer = answers.get()
        if answer is None:
            left -= 1
        else:
            yield answer


class _Worker:
    """A process that sees one GPU; started when it is needed, and anew when it was lost."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0

    def call(self, function: Callable[[J], R], job: J, seconds: float) -> R:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                1, mp_context=context, initializer=_see, initargs=(self.gpu,)
            )
            self._pid = self._pool.submit(os.getpid).result()
        try:
            return self._pool.submit(function, job).result(timeout=seconds)
        except (BrokenProcessPool, TimeoutError):
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _see(gpu: str) -> None:
    os.environ[_VISIBLE] = gpu
