"""Which records there are: one sqlite table, opened for each operation.

No connection outlives an operation, so that forked and killed processes leave nothing half open.
Everything in a row is also in the record's provenance; the row is only the way to it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal

from nostall.core.measurement import Kind
from nostall.store.errors import BadStore

VERSION = 1
_PATIENCE = 30.0
"""Seconds to wait for another writer."""

Origin = Literal["tuned", "imported"]


@dataclass(frozen=True)
class Row:
    """One record.  ``id`` is the sha256 of its provenance; ``low`` the lower end of the measured
    ratio's interval, or the modelled ratio."""

    id: str
    original: str
    optimised: str
    kernel: str
    architecture: str
    kind: Kind
    gpu: str | None
    ratio: float
    low: float
    created: str
    source: Origin


_COLUMNS = tuple(field.name for field in fields(Row))
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records (
  id TEXT PRIMARY KEY, original TEXT NOT NULL, optimised TEXT NOT NULL, kernel TEXT NOT NULL,
  architecture TEXT NOT NULL, kind TEXT NOT NULL, gpu TEXT, ratio REAL NOT NULL, low REAL NOT NULL,
  created TEXT NOT NULL, source TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_original ON records (original);
PRAGMA user_version = {VERSION};
COMMIT;
"""


class Index:
    """The table of records at ``path``; a missing file is an empty table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, rows: Sequence[Row]) -> None:
        """Add records, all or none; one that is there already stays as it is."""
        marks = ", ".join("?" * len(_COLUMNS))
        with self._write() as database:
            database.executemany(
                f"INSERT OR IGNORE INTO records ({', '.join(_COLUMNS)}) VALUES ({marks})",
                [astuple(row) for row in rows],
            )

    def remove(self, id: str) -> None:
        with self._write() as database:
            database.execute("DELETE FROM records WHERE id = ?", (id,))

    def of_original(self, sha256: str) -> list[Row]:
        """The records for one original: measured before modelled, surest gain first."""
        return self._rows(
            "WHERE original = ? ORDER BY kind = 'modelled', low DESC, created DESC, id", sha256
        )

    def starting_with(self, prefix: str) -> list[Row]:
        """The records whose id or original starts with ``prefix``."""
        return self._rows(
            "WHERE substr(id, 1, ?1) = ?2 OR substr(original, 1, ?1) = ?2 ORDER BY created, id",
            len(prefix),
            prefix,
        )

    def all(self) -> list[Row]:
        return self._rows("ORDER BY created, id")

    def uses(self, sha256: str) -> bool:
        """Whether any record still names this cubin."""
        return bool(self._rows("WHERE original = ?1 OR optimised = ?1", sha256))

    def _rows(self, condition: str, *values: object) -> list[Row]:
        if not self.path.exists():
            return []
        with self._read() as database:
            if _version(database, self.path) == 0:
                return []
            found = database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM records {condition}", values
            ).fetchall()
        return [Row(*values) for values in found]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._errors("read"), closing(self._reader()) as database:
            yield database

    def _reader(self) -> sqlite3.Connection:
        """A connection for reading; in a folder that cannot be written, such as a container image,
        sqlite cannot make the files that readers of a live table share, and needs none."""
        database = self._open("mode=ro")
        try:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return database
        except sqlite3.OperationalError:
            database.close()
            if self._waiting():
                raise
            return self._open("immutable=1")

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._errors("write"), closing(self._open("mode=rwc")) as database:
            if _version(database, self.path) != VERSION:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    def _open(self, how: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{how}",
            uri=True,
            timeout=_PATIENCE,
            isolation_level=None,
        )

    def _waiting(self) -> bool:
        """Whether rows wait in the write-ahead log, which an immutable reader would not see."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return log.exists() and log.stat().st_size > 0

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise BadStore(
                f"cannot {what} {self.path}: {error}; set NOSTALL_HOME to another folder, or move "
                "this file away to begin an empty store"
            ) from error


def _version(database: sqlite3.Connection, path: Path) -> int:
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise BadStore(
            f"{path} is of version {version}; this nostall knows up to {VERSION}: upgrade nostall, "
            "or set NOSTALL_HOME to another folder"
        )
    return version
