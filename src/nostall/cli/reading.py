"""A progress bar for reading large files; only on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from nostall.cli.console import err


class Reading:
    """Shows how many bytes of all files are read."""

    def __init__(self, paths: Sequence[Path], *, enabled: bool) -> None:
        total = sum(path.stat().st_size for path in paths if path.exists())
        self._done: dict[Path, int] = {}
        self._bar = Progress(
            TextColumn("reading"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=err,
            disable=not (enabled and err.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("reading", total=total)

    def __enter__(self) -> Reading:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_bytes(self, path: Path, done: int) -> None:
        """``done`` bytes of one file are read."""
        self._done[path] = done
        self._bar.update(self._task, completed=sum(self._done.values()))
