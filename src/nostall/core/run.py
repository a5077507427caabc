"""Run directories: ``run.json``, ``trials.csv``, ``checkpoint.json`` and the files of the result.

A killed process loses nothing that is recorded: the trial log is append-only and flushed at each
checkpoint, and every other file is replaced atomically.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core import trial_log
from nostall.core.errors import BadRun
from nostall.core.files.atomic import remove_abandoned, write_atomically
from nostall.core.files.folder_lock import FolderLock
from nostall.core.search import Checkpoint, Trial
from nostall.core.trial_log import TrialLog, read_trials, remove_partial_row
from nostall.core.validation import dump_json, first_problem, load_json


class RunRecord(BaseModel):
    """The contents of ``run.json``."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    command: str
    created: str
    status: Literal["running", "done", "interrupted", "failed"] = "running"
    settings: dict[str, Any]
    result: dict[str, Any] | None = None


class Run:
    """A run directory.  As an observer of a search it logs trials and saves checkpoints.

    The context of a run is that of its only writer: it raises :class:`BadRun` if another process
    is in it.  Readers need no context.
    """

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self._log: TextIO | None = None
        self._lock = FolderLock(path)

    @classmethod
    def create(
        cls,
        path: Path,
        command: str,
        settings: dict[str, Any],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Run:
        """Create a run directory.

        ``files`` (content by name) are written before ``run.json``, so a directory with a
        ``run.json`` has them all, even after a kill.

        Raises :class:`BadRun` if the directory already holds a run or cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRun(
                f"cannot write to {path}: {error.strerror}; choose a writable directory with --out"
            ) from error
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = cls(path, RunRecord(command=command, created=now, settings=settings))
        run._lock.acquire()
        try:
            if (path / "run.json").exists():
                raise BadRun(f"{path} already holds a run; choose another directory with --out")
            for name, data in files.items():
                run.write(name, data)
            run.save()
        finally:
            run._lock.release()
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """Open an existing run directory.

        Raises :class:`BadRun` if ``run.json`` is missing, unreadable or of another format.
        """
        try:
            text = (path / "run.json").read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            file = "run.json: " if path.is_dir() else ""
            raise BadRun(
                f"{path} is not a run directory ({file}{reason}); give one that `nostall tune` or "
                "`nostall fuse` wrote"
            ) from error
        try:
            return cls(path, load_json(RunRecord, text))
        except ValidationError as error:
            raise BadRun(f"{path / 'run.json'}: {first_problem(error)}") from error

    def save(self) -> None:
        """Write ``run.json``."""
        self.write("run.json", dump_json(self.record).encode())

    def finish(
        self, status: Literal["done", "interrupted", "failed"], result: dict[str, Any]
    ) -> None:
        """Record how the run ended, and close the trial log."""
        self.record = self.record.model_copy(update={"status": status, "result": result})
        self.save()
        if self._log is not None:
            self._log.close()
            self._log = None

    def restart(self, settings: dict[str, Any]) -> None:
        """Record that the run continues, with these settings."""
        update = {"status": "running", "settings": settings}
        self.record = self.record.model_copy(update=update)
        self.save()

    def write(self, name: str, data: bytes) -> Path:
        """Write a file of the directory atomically; returns its path."""
        target = self.path / name
        write_atomically(target, data)
        return target

    def on_trial(self, trial: Trial) -> None:
        """Append one row to ``trials.csv``."""
        if self._log is None:
            path = self.path / trial_log.FILE
            is_empty = remove_partial_row(path) == 0
            self._log = path.open("a", newline="")
            if is_empty:
                csv.writer(self._log).writerow(trial_log.FIELDS)
        csv.writer(self._log).writerow([getattr(trial, name) for name in trial_log.FIELDS])

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Flush the log and replace ``checkpoint.json``."""
        if self._log is not None:
            self._log.flush()
        self.write("checkpoint.json", checkpoint.dump().encode())

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None if none was saved.

        Raises :class:`BadRun` if ``checkpoint.json`` cannot be used.
        """
        path = self.path / "checkpoint.json"
        if not path.exists():
            return None
        try:
            return Checkpoint.load(path.read_text())
        except (OSError, ValueError, TypeError) as error:
            raise BadRun(f"{path} cannot be used ({error}); start the run anew") from error

    def trial_log(self) -> TrialLog:
        """The logged trials by index, and remarks on rows that cannot be used."""
        return read_trials(self.path / trial_log.FILE)

    def trials(self) -> tuple[Trial, ...]:
        """The logged trials by index, without those of rows that cannot be used."""
        return self.trial_log().trials

    def __enter__(self) -> Run:
        """Lock the directory, and remove temporary files that a killed process left.

        Raises :class:`BadRun` if another process writes the directory.
        """
        self._lock.acquire()
        remove_abandoned(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        self._lock.release()
