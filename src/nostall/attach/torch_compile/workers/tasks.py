"""Background tasks of a graph, and the progress line on the terminal.

Most background threads only wait for worker processes.  If no worker can generate and compile
kernels, one thread does that itself.  No thread of the user's process runs Inductor, because
PyTorch's tracing sets process-wide flags: a compiled function that is called meanwhile raises.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from nostall.attach.torch_compile.workers.cpu_time import FINISHED_CHILDREN
from nostall.attach.warning import warn_once

Task = Callable[[], None]
TaskSource = Callable[[], Iterable[Task]]
"""Does preparatory work and returns the tasks that follow from it."""

EXIT_TIMEOUT_S = 10.0
"""Longest wait for the running task at interpreter exit, in seconds."""

_graph_lock = threading.Lock()
"""Held while one graph's tasks run: the user's process needs the other CPUs."""
_task_lock = threading.Lock()
"""Held while a task runs."""
_exiting = threading.Event()
"""Set at interpreter exit: no further task starts."""


def _reset_after_fork() -> None:
    """A forked process has no background threads, so it must not inherit locks that they hold."""
    global _graph_lock, _task_lock
    _graph_lock, _task_lock = threading.Lock(), threading.Lock()
    for tasks in list(_instances):
        tasks.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


_exit_hooks: list[Callable[[], None]] = []


def register_exit_hook(hook: Callable[[], None]) -> None:
    """Register a callback that runs at interpreter exit and unblocks background threads."""
    _exit_hooks.append(hook)


_instances: WeakSet[BackgroundTasks] = WeakSet()


def is_exiting() -> bool:
    """Whether the interpreter exits."""
    return _exiting.is_set()


def _at_exit() -> None:
    """Wait for the running task.

    Before Python 3.14 a thread that returns from C++ to a finalized interpreter aborts the process.
    """
    _exiting.set()
    for hook in _exit_hooks:
        hook()
    _task_lock.acquire(timeout=EXIT_TIMEOUT_S)


atexit.register(_at_exit)


class BackgroundTasks:
    """Tasks that prepare the candidate of one graph, in background threads."""

    def __init__(self) -> None:
        self.reset_after_fork()
        _instances.add(self)
        self._unfinished = 0
        self._sources: list[TaskSource] = []
        self._early_tasks: list[Task] = []
        self._final_tasks: list[Task] = []
        # Wall time of the main background thread, in seconds.
        self.seconds = 0.0
        # CPU time of all threads and of the compilers that they started, in seconds.
        self.cpu_seconds = 0.0

    def reset_after_fork(self) -> None:
        """In a forked process: make a new lock, because the thread that held it does not exist."""
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether everything that was added is done."""
        return self._unfinished == 0

    def add(self, source: TaskSource) -> None:
        """Add tasks for the time after the first step.

        During the first step Inductor's compilation would wait for Python's lock whenever the tasks
        run Python code.
        """
        with self._lock:
            self._unfinished += 1
            self._sources.append(source)

    def add_final(self, task: Task) -> None:
        """Add a task with a thread of its own, which starts after all sources were called.

        It runs beside the other tasks, and mostly waits.
        """
        with self._lock:
            self._unfinished += 1
            self._final_tasks.append(task)

    def add_early(self, task: Task) -> None:
        """Add a task with a thread of its own, which starts beside the first source."""
        with self._lock:
            self._unfinished += 1
            self._early_tasks.append(task)

    def take_cpu_seconds(self) -> float:
        """CPU seconds since the last call of this method."""
        with self._lock:
            seconds, self.cpu_seconds = self.cpu_seconds, 0.0
        return seconds

    def start(self) -> None:
        """Start threads for what was added.  Failures are logged; the work is then done later."""
        with self._lock:
            sources, self._sources = self._sources, []
            early_tasks, self._early_tasks = self._early_tasks, []
            final_tasks, self._final_tasks = self._final_tasks, []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        all_found, now = threading.Event(), threading.Event()
        now.set()
        for task in early_tasks:
            _start_thread(self._run_beside, task, now, device)
        if sources:
            _start_thread(self._run, sources, all_found, device)
        else:
            all_found.set()
        for task in final_tasks:
            _start_thread(self._run_beside, task, all_found, device)

    def _run(
        self, sources: Sequence[TaskSource], all_found: threading.Event, device: int | None
    ) -> None:
        """Call all sources, then run their tasks."""
        with (
            _graph_lock,
            FINISHED_CHILDREN.account(self.add_cpu_seconds),
            self._count_thread_time(),
        ):
            began = time.perf_counter()
            tasks: list[Task] = []
            for source in sources:
                with log_errors(), _on_device(device):
                    tasks.extend(source())
            all_found.set()
            for task in tasks:
                with _task_lock, log_errors(), _on_device(device):
                    if not _exiting.is_set():
                        task()
            with self._lock:
                self.seconds += time.perf_counter() - began
                self._unfinished -= len(sources)

    def _run_beside(self, task: Task, begin: threading.Event, device: int | None) -> None:
        """Run a task without the lock of the graph, so that other graphs do not wait for it."""
        begin.wait()
        with self._count_thread_time(), log_errors(), _on_device(device):
            if not _exiting.is_set():
                task()
        with self._lock:
            self._unfinished -= 1

    @contextlib.contextmanager
    def _count_thread_time(self) -> Iterator[None]:
        before = time.thread_time()
        try:
            yield
        finally:
            self.add_cpu_seconds(time.thread_time() - before)

    def add_cpu_seconds(self, seconds: float) -> None:
        with self._lock:
            self.cpu_seconds += seconds


def _start_thread(work: Callable[..., None], *args: Any) -> None:
    """Start a daemon thread, for which the interpreter does not wait at its exit."""
    try:
        threading.Thread(target=work, args=args, name="nostall-stitch", daemon=True).start()
    except RuntimeError as error:  # the tasks are never ready, so Inductor's version stays
        warn_once(f"nothing is prepared in the background: {error}")


def _on_device(device: int | None) -> contextlib.AbstractContextManager[Any]:
    """Set the current GPU, because new threads begin with the first one."""
    return torch.cuda.device(device) if device is not None else contextlib.nullcontext()


@contextlib.contextmanager
def log_errors() -> Iterator[None]:
    """Log an exception once and suppress it: background work must not end the user's process."""
    try:
        yield
    except Exception as error:  # a kernel that is missing later is compiled then
        warn_once(f"background preparation failed: {type(error).__name__}: {error}")


def print_progress(text: str, *, last: bool = False) -> None:
    """Write the progress line, if standard error is a terminal and this is rank 0.

    The line is overwritten by the next one, except for the ``last``.
    """
    stream: Any = sys.stderr
    if stream is None or not stream.isatty() or not _is_first_rank():
        return
    stream.write(f"\r\x1b[2Knostall: {text}" + ("\n" if last else ""))
    stream.flush()


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank()
    )
