"""Run jobs on several GPUs: one process and one queue of jobs for each GPU."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from nostall.core.errors import one_line
from nostall.core.process import Channel, ChildProcess, ProcessEnded

J = TypeVar("J")
R = TypeVar("R")

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_START_SECONDS = 600.0
"""Deadline for the start of a process, which imports the parent's main module."""
_SLACK_SECONDS = 120.0
"""A job counts as hung after three times its expected time and this."""
_EXIT_SECONDS = 60.0
"""Time that an idle process has to exit before it is killed."""


class WorkerLost(Exception):
    """The process of a job ended before the job did."""


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA names them; empty without a driver."""
    variable = os.environ.get(_VISIBLE_DEVICES)
    if variable is not None:
        return [name.strip() for name in variable.split(",") if name.strip()]
    try:
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split()


def assign_queues(
    jobs: Sequence[J], gpus: int, name: Callable[[J], str], names: Sequence[str]
) -> list[list[J]]:
    """Divide jobs into one queue for each GPU, in order.

    Jobs with the same ``name(job)`` share a GPU, which depends only on ``names``: all names, of
    which ``jobs`` may have a part.
    """
    gpu_by_name = {key: number % gpus for number, key in enumerate(names)}
    return [[job for job in jobs if gpu_by_name[name(job)] == gpu] for gpu in range(gpus)]


@dataclass(frozen=True)
class JobResult(Generic[J, R]):
    """The result of a job, or the error that ended it."""

    job: J
    result: R | None
    error: Exception | None = None


def run_jobs(
    function: Callable[[J], R],
    queues: Sequence[Sequence[J]],
    gpus: Sequence[str],
    until: float,
    expected: Callable[[J], float],
) -> Iterator[JobResult[J, R]]:
    """Run each queue on its GPU, one job after the other; yields results as they arrive.

    ``expected(job)``: the job's time in seconds.  A job starts only if it is expected to end before
    ``until`` (of the monotonic clock).  If a process dies or a job hangs, that job fails, and the
    next one gets a new process.
    """
    results: queue.SimpleQueue[JobResult[J, R] | None] = queue.SimpleQueue()

    def run_queue(gpu: str, jobs: Sequence[J]) -> None:
        worker = _GpuWorker(gpu)
        try:
            for job in jobs:
                seconds = expected(job)
                if monotonic() + seconds > until:
                    break
                try:
                    deadline = 3 * seconds + _SLACK_SECONDS
                    results.put(JobResult(job, worker.call(function, job, deadline)))
                except Exception as error:  # any exception of the job is its result
                    results.put(JobResult(job, None, error))
        finally:
            worker.close()
            results.put(None)

    threads = [
        threading.Thread(target=run_queue, args=pair, daemon=True)
        for pair in zip(gpus, queues, strict=True)
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    while running:
        result = results.get()
        if result is None:
            running -= 1
        else:
            yield result


class _GpuWorker:
    """A process that sees one GPU; it starts with the first job, and anew after it was lost."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self._process: ChildProcess | None = None

    def call(self, function: Callable[[J], R], job: J, seconds: float) -> R:
        """Run ``function(job)`` in the process.

        Raises :class:`TimeoutError` if it takes longer than ``seconds``, :class:`WorkerLost` if the
        process ends, and any exception of the function.
        """
        process = self._process or self._start()
        try:
            process.send((function, job), seconds)
            result: R
            result, error = process.receive(seconds)
        except TimeoutError:
            self._stop(0)
            raise
        except ProcessEnded as cause:
            code = self._stop(0)
            raise WorkerLost(f"the process ended ({cause}; exit code {code})") from cause
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the process."""
        self._stop(_EXIT_SECONDS)

    def _start(self) -> ChildProcess:
        # Not a daemon, because jobs start processes, too.
        self._process = process = ChildProcess.spawn(_serve_jobs, self.gpu, daemon=False)
        try:
            process.receive(_START_SECONDS)
        except (ProcessEnded, TimeoutError) as cause:
            code = self._stop(0)
            raise WorkerLost(f"the process did not start ({cause}; exit code {code})") from cause
        return process

    def _stop(self, grace_seconds: float) -> int | None:
        process, self._process = self._process, None
        return None if process is None else process.reap(grace_seconds)


def _serve_jobs(channel: Channel, gpu: str) -> None:
    """Main function of the process: runs jobs until the parent closes the channel."""
    os.environ[_VISIBLE_DEVICES] = gpu
    channel.send("ready")
    while True:
        try:
            function, job = channel.receive()
        except ProcessEnded:
            return
        try:
            channel.send((function(job), None))
        except ProcessEnded:
            return
        except Exception as error:  # of the job, or because its result cannot be pickled
            channel.send((None, _sendable(error)))


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note, or a plain copy if it cannot be pickled."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # classes whose constructors take other arguments cannot be unpickled
        return RuntimeError(one_line(error))
    return error
