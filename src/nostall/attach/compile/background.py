"""Work behind the program's back, what compiling took, and a line about it.

Only our own part runs in a thread: exploring regions, writing kernels, Triton.  PyTorch's tracing
sets flags that all threads see (a compiled function called meanwhile raises), so it is left to the
program's own thread, where it finds every region stitched already.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from nostall.attach.delivery import say_once

_turn = threading.Lock()
"""One thread at a time: the program has work to do, too."""


class Preparation:
    """What is done for one graph before it is compiled a second time; ``seconds`` and
    ``cpu_seconds`` (of its threads) say what it took."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._waiting: list[Callable[[], None]] = []
        self.seconds = self.cpu_seconds = 0.0

    @property
    def ready(self) -> bool:
        return self._open == 0

    def add(self, work: Callable[[], None]) -> None:
        """Something to do once the first step is over: before, Inductor's compilation would wait
        for our thread as long as that runs Python."""
        with self._lock:
            self._open += 1
            self._waiting.append(work)

    def start(self) -> None:
        """Do what was added, in threads.  What fails there is said, and done again by who needs
        it."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        for work in waiting:
            threading.Thread(
                target=self._run, args=(work, device), name="nostall-stitch", daemon=True
            ).start()

    def _run(self, work: Callable[[], None], device: int | None) -> None:
        with _turn:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                work()
            except Exception as error:  # a thread of the program ends quietly
                say_once(f"stitching in the background failed: {type(error).__name__}: {error}")
            with self._lock:
                self.seconds += time.perf_counter() - wall
                self.cpu_seconds += time.thread_time() - cpu
                self._open -= 1


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
