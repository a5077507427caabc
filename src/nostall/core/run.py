"""A run directory: ``run.json``, ``trials.csv``, ``checkpoint.json`` and what the run produced.

Everything is written so that a killed process loses nothing already recorded: the trial log is
append-only and flushed, every other file is replaced atomically.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.errors import BadRun
from nostall.core.files import write_atomically
from nostall.core.search import Checkpoint, Trial

_FIELDS = [f.name for f in dataclasses.fields(Trial)]


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
    """One directory that holds a search's whole story.  Also an observer: it logs each trial."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self._log: TextIO | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        command: str,
        settings: dict[str, Any],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Run:
        """Make the directory; refuse one that already holds a run.

        ``files`` are written before ``run.json``: where that is, a killed process left them too.
        """
        if (path / "run.json").exists():
            raise BadRun(
                f"{path} already holds a run; continue it with --resume {path}, or choose another "
                "directory with --out"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            run = cls(path, RunRecord(command=command, created=now, settings=settings))
            for name, data in files.items():
                run.write(name, data)
            run.save()
        except OSError as error:
            raise BadRun(
                f"cannot write to {path}: {error.strerror}; choose a writable directory with --out"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """Read an existing run; a missing or foreign ``run.json`` is a :class:`BadRun`."""
        try:
            text = (path / "run.json").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadRun(
                f"{path} is not a run directory (run.json cannot be read: {error}); "
                "`nostall tune` makes one"
            ) from error
        try:
            return cls(path, RunRecord.model_validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(p) for p in first["loc"]) or "the file"
            raise BadRun(f"{path / 'run.json'}: {where}: {first['msg']}") from error

    def save(self) -> None:
        """Replace ``run.json``."""
        self.write("run.json", self.record.model_dump_json(indent=1).encode())

    def finish(
        self, status: Literal["done", "interrupted", "failed"], result: dict[str, Any]
    ) -> None:
        """Record how the run ended."""
        self.record = self.record.model_copy(update={"status": status, "result": result})
        self.save()
        if self._log is not None:
            self._log.close()
            self._log = None

    def write(self, name: str, data: bytes) -> Path:
        """Put ``data`` at ``name`` in the directory, atomically; returns its path."""
        target = self.path / name
        write_atomically(target, data)
        return target

    def on_trial(self, trial: Trial) -> None:
        """Append one row to ``trials.csv``."""
        if self._log is None:
            path = self.path / "trials.csv"
            fresh = not _drop_cut_row(path)
            self._log = path.open("a", newline="")
            if fresh:
                csv.writer(self._log).writerow(_FIELDS)
        csv.writer(self._log).writerow([getattr(trial, name) for name in _FIELDS])

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Flush the log and replace ``checkpoint.json``."""
        if self._log is not None:
            self._log.flush()
        self.write("checkpoint.json", json.dumps(dataclasses.asdict(checkpoint)).encode())

    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None when the run never got that far."""
        path = self.path / "checkpoint.json"
        if not path.exists():
            return None
        try:
            return Checkpoint(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadRun(f"{path} cannot be used ({error}); start the run anew") from error

    def trials(self) -> Iterator[Trial]:
        """The logged trials, oldest first; a row cut off by a kill ends the log.

        After a resume, a trial that is logged twice is taken from its last row.
        """
        path = self.path / "trials.csv"
        if not path.exists():
            return
        rows: dict[int, Trial] = {}
        with path.open(newline="") as log:
            for row in csv.DictReader(log):
                trial = _trial(row)
                if trial is not None:
                    rows[trial.index] = trial
        yield from (rows[index] for index in sorted(rows))

    def __enter__(self) -> Run:
        """Take away the parts of files that a killed process was writing, and go on."""
        for ending in ("json", "cubin", "html"):
            for part in self.path.glob(f".*.{ending}.????????"):
                part.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def _drop_cut_row(path: Path) -> int:
    """Cut a log back to its last whole row, lest the next one be glued to it; bytes kept."""
    if not path.exists():
        return 0
    with path.open("r+b") as log:
        kept = log.read().rfind(b"\n") + 1
        log.truncate(kept)
    return kept


def _trial(row: dict[str, str]) -> Trial | None:
    if row.get("failure") is None:  # the last field: without it the row was cut off
        return None
    try:
        return Trial(
            index=int(row["index"]),
            value=float(row["value"]),
            accepted=row["accepted"] == "True",
            best=float(row["best"]),
            move=row["move"],
            rejected=int(row["rejected"]),
            seconds=float(row["seconds"]),
            failure=row["failure"] or None,
        )
    except (KeyError, TypeError, ValueError):
        return None
