"""Index of the store's records: one SQLite table, opened anew for each operation.

No connection outlives an operation, so forked and killed processes leave none open.  All values of
a row are also in the record's provenance file; the table only makes records easy to find.
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
_LOCK_WAIT_SECONDS = 30.0
"""Time for which SQLite waits for another writer."""

Origin = Literal["tuned", "imported"]


@dataclass(frozen=True)
class Row:
    """One record of the store.  Field names are the table's columns."""

    id: str
    """sha256 of the provenance file."""
    original: str
    """sha256 of the original cubin."""
    optimised: str
    """sha256 of the optimised cubin."""
    kernel: str
    architecture: str
    """Such as ``sm_90``."""
    kind: Kind
    gpu: str | None
    """Name of the GPU on which the gain was measured; None if it is modelled."""
    ratio: float
    """Time of the original / time of the optimised cubin."""
    low: float
    """Lower end of the measured ratio's interval, or the modelled ratio."""
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
    """The table of records in the SQLite file ``path``; a missing file is an empty table.

    All methods raise :class:`BadStore` if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, rows: Sequence[Row]) -> None:
        """Add all records or none; a record with a known id is left as it is."""
        placeholders = ", ".join("?" * len(_COLUMNS))
        with self._write() as database:
            database.executemany(
                f"INSERT OR IGNORE INTO records ({', '.join(_COLUMNS)}) VALUES ({placeholders})",
                [astuple(row) for row in rows],
            )

    def remove(self, id: str) -> None:
        """Delete the record with this id, if it exists."""
        with self._write() as database:
            database.execute("DELETE FROM records WHERE id = ?", (id,))

    def find_original(self, sha256: str) -> list[Row]:
        """The records of one original: measured before modelled, then by ``low``, largest first."""
        return self._rows(
            "WHERE original = ? ORDER BY kind = 'modelled', low DESC, created DESC, id", sha256
        )

    def find_prefix(self, prefix: str) -> list[Row]:
        """The records whose id or original starts with ``prefix``."""
        return self._rows(
            "WHERE substr(id, 1, ?1) = ?2 OR substr(original, 1, ?1) = ?2 ORDER BY created, id",
            len(prefix),
            prefix,
        )

    def all(self) -> list[Row]:
        """All records, oldest first."""
        return self._rows("ORDER BY created, id")

    def is_referenced(self, sha256: str) -> bool:
        """Whether any record has this cubin as original or optimised."""
        return bool(self._rows("WHERE original = ?1 OR optimised = ?1", sha256))

    def _rows(self, condition: str, *values: object) -> list[Row]:
        if not self.path.exists():
            return []
        with self._read() as database:
            if _schema_version(database, self.path) == 0:
                return []
            rows = database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM records {condition}", values
            ).fetchall()
        return [Row(*row) for row in rows]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._translate_errors("read"), closing(self._open_for_reading()) as database:
            yield database

    def _open_for_reading(self) -> sqlite3.Connection:
        """Open a read-only connection, as immutable if the folder cannot be written.

        SQLite's readers create files beside the table.  In a read-only folder, such as a container
        image, they cannot, and do not need them because nothing changes.
        """
        database = self._open("mode=ro")
        try:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return database
        except sqlite3.OperationalError:
            database.close()
            if self._has_pending_rows():
                raise
            return self._open("immutable=1")

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._translate_errors("write"), closing(self._open("mode=rwc")) as database:
            if _schema_version(database, self.path) != VERSION:
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    def _open(self, options: str) -> sqlite3.Connection:
        return sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{options}",
            uri=True,
            timeout=_LOCK_WAIT_SECONDS,
            isolation_level=None,
        )

    def _has_pending_rows(self) -> bool:
        """Whether the write-ahead log has rows, which an immutable connection would not see."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return log.exists() and log.stat().st_size > 0

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        """Raise SQLite's errors as :class:`BadStore`."""
        try:
            yield
        except sqlite3.Error as error:
            raise BadStore(
                f"cannot {action} {self.path}: {error}; set NOSTALL_HOME to another folder, or "
                "move this file away to start an empty store"
            ) from error


def _schema_version(database: sqlite3.Connection, path: Path) -> int:
    """The table's schema version; 0 for an empty file.

    Raises :class:`BadStore` if the version is newer than :data:`VERSION`.
    """
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise BadStore(
            f"{path} has version {version}; this nostall supports up to {VERSION}: upgrade "
            "nostall, or set NOSTALL_HOME to another folder"
        )
    return version
