"""Progress bars: a search, reading of files, and the stages of a job; shown on terminals only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nostall.cli.terminal.console import err
from nostall.core.compile_clock import compiled_s
from nostall.core.search import Budget, Checkpoint, Trial

_UPDATE_INTERVAL = 64
"""Trials between two updates of a search's bar."""


def progress_bar(*columns: ProgressColumn, enabled: bool) -> Progress:
    """A bar on standard error that disappears at its end."""
    return Progress(
        *columns, console=err, disable=not (enabled and err.is_terminal), transient=True
    )


def stage_bar(*, enabled: bool) -> Progress:
    """A bar for a job with stages; a task's description names the current stage."""
    return progress_bar(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), enabled=enabled
    )


@contextmanager
def working(text: str, *, enabled: bool = True) -> Iterator[Callable[[str], None]]:
    """Say what is done, with the seconds so far; yields a function that changes the text.

    Enter it before slow imports, so that a command says what it does within a second.
    """
    with stage_bar(enabled=enabled) as bar:
        task = bar.add_task(text, total=None)
        yield lambda changed: bar.update(task, description=changed)


class SearchProgress:
    """Observer that shows the used share of the budget and the best ratio so far."""

    def __init__(self, budget: Budget, *, enabled: bool) -> None:
        self.budget = budget
        self._start_value: float | None = None
        self._bar = progress_bar(
            TextColumn("searching"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            enabled=enabled,
        )
        self._task = self._bar.add_task("search", total=1.0, state="")

    def __enter__(self) -> SearchProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_trial(self, trial: Trial) -> None:
        """Update the bar at every ``_UPDATE_INTERVAL``-th trial."""
        if self._start_value is None:
            self._start_value = trial.best
        if trial.index % _UPDATE_INTERVAL:
            return
        shares = [
            trial.seconds / self.budget.seconds if self.budget.seconds else 0.0,
            trial.index / self.budget.evaluations if self.budget.evaluations else 0.0,
        ]
        ratio = self._start_value / trial.best if trial.best else 1.0
        state = f"{trial.index} evaluations, {trial.rejected} illegal moves, best {ratio:.4f}x"
        self._bar.update(self._task, completed=min(1.0, max(shares)), state=state)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Do nothing."""


class ReadProgress:
    """Shows how many bytes of several files are read."""

    def __init__(self, paths: Sequence[Path], *, enabled: bool) -> None:
        total = sum(path.stat().st_size for path in paths if path.exists())
        self._bytes_read: dict[Path, int] = {}
        self._bar = progress_bar(
            TextColumn("reading"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            enabled=enabled,
        )
        self._task = self._bar.add_task("reading", total=total)

    def __enter__(self) -> ReadProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_bytes(self, path: Path, count: int) -> None:
        """Record that ``count`` bytes of one file are read."""
        self._bytes_read[path] = count
        self._bar.update(self._task, completed=sum(self._bytes_read.values()))


_STANDARD_ERROR = 2
"""File descriptor."""


class Interruption:
    """Observer that ends a search at the next trial after Ctrl-C; use it in the main thread.

    Python raises the interrupt wherever the process happens to be.  In a callback from compiled
    code (Numba, a finalizer) the exception is printed or dropped, and the search would go on.  This
    observer therefore notes the interrupt and raises it again.
    """

    def __init__(self, notice: str | None = None) -> None:
        """``notice``: printed at the first Ctrl-C, because the work after it takes a while."""
        self.requested = False
        """Whether Ctrl-C was pressed and has not been raised at a trial."""
        self._notice = notice
        self._previous_handler: Any = None

    def __enter__(self) -> Interruption:
        self._previous_handler = signal.getsignal(signal.SIGINT)
        # A shell starts background jobs with interrupts ignored; these stay ignored.
        if self._previous_handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def on_trial(self, trial: Trial) -> None:
        """Raise a noted interrupt, once."""
        if self.requested:
            self.requested = False
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Do nothing: the last checkpoint of an interrupted search must be written."""

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._notice is not None:
            # Not by print(): the signal may have come within a write to the same stream.
            with suppress(OSError):
                os.write(_STANDARD_ERROR, f"\n{self._notice}\n".encode())
            self._notice = None
        raise KeyboardInterrupt


MIN_SHOWN_SECONDS = 1.0


@dataclass
class CompileTime:
    """Seconds of compilation so far."""

    seconds: float = 0.0

    def show(self, counted: str = "of the time limit ") -> None:
        """Print the time if it is long; ``counted`` says how a time limit counts it."""
        if self.seconds >= MIN_SHOWN_SECONDS:
            err.print(
                f"{self.seconds:.1f} s {counted}compiled nostall's models with Numba; the next "
                "run on this machine takes them from its cache"
            )


@contextmanager
def measured_compile_time() -> Iterator[CompileTime]:
    """Measure how long Numba compiles in this context."""
    total, before = CompileTime(), compiled_s()
    try:
        yield total
    finally:
        total.seconds = compiled_s() - before
