"""Compilation behind the program's back: one job at a time, as the caller would have done it."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Ambient:
    """What PyTorch keeps for each thread and compilation looks at."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: int | None

    @classmethod
    def here(cls) -> Ambient:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self.device is not None:
                stack.enter_context(torch.cuda.device(self.device))
            yield


class Job(Generic[T]):
    """Work that was begun; ``seconds`` and ``cpu_seconds`` (of its thread) say what it took."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.seconds = self.cpu_seconds = 0.0

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> T:
        """What the work gave or raised; waits for it."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        from torch._dynamo.convert_frame import compile_lock

        # PyTorch compiles one graph at a time, too.
        with compile_lock:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                self._result = self._work()
            except BaseException as error:  # given to whoever asks for the result
                self._error = error
            self.seconds = time.perf_counter() - wall
            self.cpu_seconds = time.thread_time() - cpu
            self._done.set()


def begin(work: Callable[[], T], *, background: bool) -> Job[T]:
    """Begin a job, with the caller's modes and configuration; done at once where it shall not be
    in the background."""
    job = Job(work)
    if not background:
        job.run()
        return job
    context, ambient = contextvars.copy_context(), Ambient.here()

    def run() -> None:
        with ambient.entered():
            job.run()

    threading.Thread(target=context.run, args=(run,), name="nostall-compile", daemon=True).start()
    return job


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
