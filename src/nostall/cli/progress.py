"""A progress bar for searches; only on a terminal."""

from __future__ import annotations

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from nostall.cli.console import err
from nostall.core.search import Budget, Checkpoint, Trial

_EVERY = 64
"""Trials between two updates of the bar."""


class Progress:
    """Observer that shows how much of the budget is used and the best ratio so far."""

    def __init__(self, budget: Budget, *, enabled: bool) -> None:
        self.budget = budget
        self.start: float | None = None
        self.bar = RichProgress(
            TextColumn("searching"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=err,
            disable=not (enabled and err.is_terminal),
            transient=True,
        )
        self.task = self.bar.add_task("search", total=1.0, state="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_trial(self, trial: Trial) -> None:
        """Show every ``_EVERY``-th trial."""
        if self.start is None:
            self.start = trial.best
        if trial.index % _EVERY:
            return
        parts = [
            trial.seconds / self.budget.seconds if self.budget.seconds else 0.0,
            trial.index / self.budget.evaluations if self.budget.evaluations else 0.0,
        ]
        ratio = self.start / trial.best if trial.best else 1.0
        state = f"{trial.index} evaluated, {trial.rejected} illegal, best {ratio:.4f}x"
        self.bar.update(self.task, completed=min(1.0, max(parts)), state=state)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to show."""
