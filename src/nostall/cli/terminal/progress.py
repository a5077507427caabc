"""Progress bars: a search, reading of files, and the stages of a job; shown on terminals only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
