"""Work behind the program's back, and a line about it.

Threads ask other processes and wait for them.  Where none can explore regions, write kernels and
have Triton compile them, one thread does; PyTorch's tracing sets flags that all threads see (a
compiled function called meanwhile raises), so no thread of the program has Inductor compile.
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

from nostall.attach.torch_compile.workers.cpu_time import ENDED
from nostall.attach.warning import warn_once

Task = Callable[[], None]
Work = Callable[[], Iterable[Task]]
"""Finds what there is to do."""

PATIENCE = 10.0
"""Seconds that the end of a program waits at most for what has begun."""

_turn = threading.Lock()
"""One graph at a time: the program has work to do, too."""
_busy, _ended = threading.Lock(), threading.Event()
"""Held by whatever runs; nothing begins when the program has ended."""


def _forked() -> None:
    """A child has none of its parent's threads, which hold these."""
    global _turn, _busy
    _turn, _busy = threading.Lock(), threading.Lock()
    for one in list(_every):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


_closing: list[Callable[[], None]] = []


def at_end(close: Callable[[], None]) -> None:
    """What ends something that a thread may be waiting for, when the program ends."""
    _closing.append(close)


_every: WeakSet[Preparation] = WeakSet()


def ending() -> bool:
    """Whether the program ends."""
    return _ended.is_set()


def _end() -> None:
    """Wait for what runs: a thread that comes back from C++ to an interpreter that is gone aborts
    the process (Python before 3.14)."""
    _ended.set()
    for close in _closing:
        close()
    _busy.acquire(timeout=PATIENCE)


atexit.register(_end)


class Preparation:
    """What is done for one graph before it is compiled a second time; ``seconds`` and
    ``cpu_seconds`` (of all its threads, and the compilers that they started) say what it took."""

    def __init__(self) -> None:
        self.forget()
        _every.add(self)
        self._open = 0
        self._waiting: list[Work] = []
        self._last: list[Task] = []
        self.seconds = self.cpu_seconds = 0.0

    def forget(self) -> None:
        """In a process that was forked: who holds the lock is not there."""
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        return self._open == 0

    def add(self, work: Work) -> None:
        """Something to do once the first step is over: before, Inductor's compilation would wait
        for our threads as long as those run Python."""
        with self._lock:
            self._open += 1
            self._waiting.append(work)

    def add_last(self, task: Task) -> None:
        """Something to do beside the tasks and other such, once all tasks have been found: for
        which a thread waits that has nothing else to do."""
        with self._lock:
            self._open += 1
            self._last.append(task)

    def taken_cpu_seconds(self) -> float:
        """What has been spent since this was asked last."""
        with self._lock:
            spent, self.cpu_seconds = self.cpu_seconds, 0.0
        return spent

    def start(self) -> None:
        """Do what was added, in threads.  What fails there is said, and done again by who needs
        it."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            last, self._last = self._last, []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        found = threading.Event()
        if waiting:
            _thread(self._run, waiting, found, device)
        else:
            found.set()
        for task in last:
            _thread(self._end_with, task, found, device)

    def _run(self, works: Sequence[Work], found: threading.Event, device: int | None) -> None:
        """First everything is found, then it is done."""
        with _turn, ENDED.open(self.add_cpu_seconds), self._counted():
            began = time.perf_counter()
            tasks: list[Task] = []
            for work in works:
                with quietly(), _on(device):
                    tasks.extend(work())
            found.set()
            for task in tasks:
                with _busy, quietly(), _on(device):
                    if not _ended.is_set():
                        task()
            with self._lock:
                self.seconds += time.perf_counter() - began
                self._open -= len(works)

    def _end_with(self, task: Task, found: threading.Event, device: int | None) -> None:
        """Other graphs need not wait for this."""
        found.wait()
        with self._counted(), quietly(), _on(device):
            if not _ended.is_set():
                task()
        with self._lock:
            self._open -= 1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Processor time of this thread."""
        before = time.thread_time()
        try:
            yield
        finally:
            self.add_cpu_seconds(time.thread_time() - before)

    def add_cpu_seconds(self, seconds: float) -> None:
        with self._lock:
            self.cpu_seconds += seconds


def _thread(work: Callable[..., None], *args: Any) -> None:
    """No program waits for it when it ends."""
    try:
        threading.Thread(target=work, args=args, name="nostall-stitch", daemon=True).start()
    except RuntimeError as error:  # the graph is never ready, and Inductor's version goes on
        warn_once(f"nothing is stitched in the background: {error}")


def _on(device: int | None) -> contextlib.AbstractContextManager[Any]:
    """A new thread is on the first GPU, whatever the program uses."""
    return torch.cuda.device(device) if device is not None else contextlib.nullcontext()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A thread of the program says what fails, once, and goes on."""
    try:
        yield
    except Exception as error:  # the program goes on; who needs a kernel compiles it
        warn_once(f"stitching in the background failed: {type(error).__name__}: {error}")


def progress(text: str, *, last: bool = False) -> None:
    """One line on a terminal that is written over; nothing anywhere else."""
    stream: Any = sys.stderr
    if stream is None or not stream.isatty() or not _first_rank():
        return
    stream.write(f"\r\x1b[2Knostall: {text}" + ("\n" if last else ""))
    stream.flush()


def _first_rank() -> bool:
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank()
    )
