"""Worker processes of the user's process: they compile graphs, and generate and compile kernels.

PyTorch's tracing sets process-wide flags, so no thread of the user's process can run Inductor in
the background; a worker can (:mod:`nostall.attach.torch_compile.workers.compile_job`).  Threads
that generate kernels would take Python's lock from the user's threads; a worker does not
(:mod:`nostall.attach.torch_compile.workers.codegen_job`).

A worker starts when there may be work for it, uses memory of a GPU only once there is, and is
stopped when the versions of all graphs are selected, or after a time without jobs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from nostall.attach.torch_compile.workers.cpu_time import (
    FINISHED_CHILDREN,
    MAX_COMPILERS,
    process_tree_seconds,
)
from nostall.attach.torch_compile.workers.tasks import register_exit_hook
from nostall.attach.torch_compile.workers.torch_state import NotOffloadable
from nostall.core.process import ChildProcess

MIN_FREE_BYTES = 2 << 30
"""Free memory of a GPU that each worker on it needs, in bytes."""
MAX_JOB_BYTES = 64 << 20
"""Largest serialized job, in bytes: a graph with the constants that it holds."""
JOB_TIMEOUT_S = 600.0
"""Longest time for one job, in seconds."""

PROGRAM = "import torch; from nostall.attach.torch_compile.workers.worker_main import main; main()"
"""Python program of a worker process.  PyTorch is imported first, as in most programs, because
pickled names depend on the order of imports (:func:`torch_state._pickle_module`)."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Job(Protocol[T_co]):
    """Work for a worker process."""

    def serialize(self) -> bytes:
        """Bytes for :meth:`run`.  Raises :class:`NotOffloadable`."""
        ...

    @staticmethod
    def run(data: bytes) -> T_co:
        """Do the job in the worker process; exceptions are reported to the caller."""
        ...


@dataclass
class JobResult(Generic[T]):
    """Result of a job, or the reason of its failure."""

    # Empty if the job succeeded.
    failure: str = ""
    # None if the job failed.
    value: T | None = None
    # CPU time of the worker and its processes since the last result, in seconds.
    cpu_seconds: float = 0.0


class Worker:
    """A worker process, on the user's GPU or on none.  Runs one job at a time."""

    def __init__(self, preload: str, *, on_gpu: bool = True, max_workers: int = 1) -> None:
        """``preload``: module that the process imports before its first job.

        ``max_workers``: workers that may be on the GPU when this one is attached; each gets its
        share of :data:`MAX_COMPILERS` and needs :data:`MIN_FREE_BYTES`.
        """
        self._preload, self._on_gpu, self._max_workers = preload, on_gpu, max_workers
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._reported_seconds = self._unreported_seconds = 0.0
        self._attached = False
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def reset_after_fork(self) -> None:
        """In a forked process: drop the reference to the worker process of the parent."""
        if self._process is not None:
            self._process.reap()
        self._reset()

    @property
    def is_running(self) -> bool:
        # Polling may reap the process, whose CPU time the job results have already reported.
        with FINISHED_CHILDREN.excluded():
            return self._process is not None and self._process.is_alive

    @property
    def is_attached(self) -> bool:
        """Whether the process runs and may use what :meth:`attach_gpu` allows."""
        return self._attached and self.is_running

    def start(self) -> None:
        """Start the process if it does not run, without waiting for it.

        It imports its modules, which takes seconds, but does not touch the GPU.  If it cannot be
        started, the first job fails and says why.
        """
        if not self._lock.acquire(blocking=False):
            return  # a caller with a job holds the lock and has started the process
        try:
            # Any error occurs again, and is reported, at the first job.
            with contextlib.suppress(Exception):
                self._start()
        finally:
            self._lock.release()

    def attach_gpu(self) -> None:
        """Allow the process to use the user's GPU, for jobs that follow; start it if necessary.

        It takes a second or more to be ready.  If this fails, the first job fails and says why.
        """
        # Any error occurs again, and is reported, at the first job.
        with self._lock, contextlib.suppress(Exception):
            self._attach()

    def run(self, job: Job[T]) -> JobResult[T]:
        """Run a job and wait for its result.  Never raises: failures are part of the result."""
        try:
            data = job.serialize()
            if len(data) > MAX_JOB_BYTES:
                size, limit = len(data) >> 20, MAX_JOB_BYTES >> 20
                raise NotOffloadable(f"a graph takes {size} MB; allowed are {limit} MB")
            with self._lock:
                return self._run(pickle.dumps((job.run, data)))
        except Exception as error:  # the user's process does the work itself if a worker fails
            return JobResult(f"{type(error).__name__}: {error}")

    def _run(self, data: bytes) -> JobResult[Any]:
        process = self._attach()
        try:
            process.send(data, JOB_TIMEOUT_S)
            result: JobResult[Any] = process.receive(JOB_TIMEOUT_S)
        except BaseException:  # raised again; after Ctrl-C an answer would be that of another job
            self._close()
            raise
        self._reported_seconds += result.cpu_seconds
        return result

    def stop(self) -> None:
        """Kill the process, also during a job; the next job starts another one."""
        process = self._process
        if process is None:
            return
        with FINISHED_CHILDREN.excluded():
            if process.is_alive:
                spent = process_tree_seconds(process.pid)
                self._unreported_seconds += max(0.0, spent - self._reported_seconds)
            process.kill()  # this closes the channel, which ends the wait of :meth:`_run`

    def take_unreported_seconds(self) -> float:
        """CPU seconds of stopped processes that no job result contains, since the last call."""
        seconds, self._unreported_seconds = self._unreported_seconds, 0.0
        return seconds

    def close(self) -> None:
        """Stop the process and start no other one, because the interpreter exits."""
        self._closed = True
        self.stop()

    def _attach(self) -> ChildProcess:
        process = self._process
        if self.is_attached and process is not None:
            return process
        uses_gpu = self._on_gpu and torch.cuda.is_initialized()
        gpu = torch.cuda.current_device() if uses_gpu else -1
        _check_gpu_memory(gpu, self._max_workers)
        process = self._start()
        process.send(gpu)
        self._attached = True
        return process

    def _start(self) -> ChildProcess:
        self._check_open()
        if self.is_running and self._process is not None:
            return self._process
        self._close()
        process = ChildProcess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM, self._preload],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, MAX_COMPILERS // self._max_workers)),
            },
        )
        self._process, self._reported_seconds, self._attached = process, 0.0, False
        try:
            self._check_open()
        except NotOffloadable:
            self._close()
            raise
        return process

    def _check_open(self) -> None:
        if self._closed:
            raise NotOffloadable("the interpreter exits")

    def _close(self) -> None:
        self.stop()
        process, self._process = self._process, None
        if process is not None:
            with FINISHED_CHILDREN.excluded():
                process.reap()


_INDUCTOR_PRELOAD = "torch._inductor.compile_fx"
_CODEGEN_PRELOAD = "nostall.attach.torch_compile.workers.codegen_job"
INDUCTOR_WORKERS = tuple(Worker(_INDUCTOR_PRELOAD, max_workers=count) for count in (1, 2, 3))
"""Workers that compile by Inductor; the second and third only help with many baselines."""
FIRST_INDUCTOR_WORKER = INDUCTOR_WORKERS[0]
CODEGEN_WORKER = Worker(_CODEGEN_PRELOAD, on_gpu=False)
"""Worker that explores regions, generates kernels and compiles them by Triton."""
_ALL_WORKERS = *INDUCTOR_WORKERS, CODEGEN_WORKER
for _worker in _ALL_WORKERS:
    register_exit_hook(_worker.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_worker.reset_after_fork)


def stop_workers() -> float:
    """Stop all workers.  Returns the CPU seconds they used that are not in any report yet."""
    for worker in _ALL_WORKERS:
        worker.stop()
    return sum(worker.take_unreported_seconds() for worker in _ALL_WORKERS)


def _check_gpu_memory(gpu: int, workers: int) -> None:
    """Raises :class:`NotOffloadable` if a GPU has no memory for so many workers.

    All of them count, because workers that are attached at the same time use no memory yet.
    ``gpu``: index of the GPU; negative for none.
    """
    if gpu < 0:
        return
    (free, _), needed = torch.cuda.mem_get_info(gpu), workers * MIN_FREE_BYTES
    if free < needed:
        raise NotOffloadable(
            f"{free >> 20} MB of the GPU are free; at least {needed >> 20} are needed"
        )
