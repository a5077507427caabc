"""Several programs on one GPU at once: only one of them is measured at a time.

Most of a run of `nostall optimize` is start and compilation, on the host.  A run that begins its
interleaved blocks is stopped by SIGSTOP while another one, or programs that take turns, are timed.
What still uses the GPU meanwhile: starts of runs, and calls of copies while results are checked.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

POLL_SECONDS = 0.03
BETWEEN_SECONDS = 3.0
"""Between two comparisons of a run, which checks a change there; its blocks are short."""
BLOCKS = "interleaved blocks"
"""In the last line of a run's log while its blocks are timed."""


class Starting(Protocol):
    """Programs that may still start while others are timed."""

    def hold(self) -> None:
        """Stop those that start."""

    def go_on(self) -> None:
        """Let them start."""


class Run:
    """A run of `nostall optimize`: its process and its log."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log, self.is_stopped = pid, log, False
        self.has_ended = False

    def is_timed(self) -> bool:
        """Whether its blocks are timed now."""
        if self.has_ended:
            return False
        lines = self.log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("nostall: ")]
        return bool(said) and BLOCKS in said[-1]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started."""
        self.is_stopped = number == signal.SIGSTOP
        for pid in (self.pid, *descendants(self.pid)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        waiting += (new := children.get(waiting.pop(), []))
        found += new
    return found


class Gate:
    """Lets one run of `nostall optimize`, or one comparison, use the GPU for its times."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.starting: list[Starting] = []
        self._holder: object | None = None
        self._wants: list[object] = []
        self._between = 0.0
        """Until then a comparison waits, because a run may go on with its next blocks."""
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; all runs go on."""
        self._ends.set()
        self._thread.join()
        for run in self.runs:
            run.send(signal.SIGCONT)

    @contextmanager
    def run(self, pid: int, log: Path) -> Iterator[None]:
        """A run of `nostall optimize` that is stopped while others are timed."""
        run = Run(pid, log)
        with self._lock:
            self.runs.append(run)
        try:
            yield
        finally:
            run.has_ended = True
            with self._lock:
                self.runs.remove(run)
                self._holder = None if self._holder is run else self._holder

    @contextmanager
    def alone(self, own: Starting | None = None) -> Iterator[None]:
        """The GPU for a comparison: other runs are not timed, and nothing else starts."""
        with self._lock:
            self._wants.append(wish := object())
        while self._holder is not wish:
            time.sleep(POLL_SECONDS)
        others = [each for each in self.starting if each is not own]
        for each in others:
            each.hold()
        try:
            yield
        finally:
            for each in others:
                each.go_on()
            self._holder = None

    def _loop(self) -> None:
        while not self._ends.wait(POLL_SECONDS):
            with self._lock:
                self._assign()

    def _assign(self) -> None:
        holder = self._holder
        if isinstance(holder, Run) and not holder.is_timed():
            self._holder = holder = None
            self._between = time.perf_counter() + BETWEEN_SECONDS
        for run in self.runs:
            if run.is_stopped and self._holder is None:
                self._holder = run
                run.send(signal.SIGCONT)
            elif not run.is_stopped and run is not self._holder and run.is_timed():
                if self._holder is None:
                    self._holder = run
                else:
                    run.send(signal.SIGSTOP)
        if self._holder is None and self._wants and time.perf_counter() > self._between:
            self._holder = self._wants.pop(0)
