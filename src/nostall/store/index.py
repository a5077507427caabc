"""Index of the store's records: one SQLite table, opened anew for each operation.

No connection outlives an operation, so forked and killed processes leave none open.  All values of
a row are also in the record's provenance file; the table only makes records easy to find.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, fields
from datetime import UTC, datetime
from pathlib import Path

from nostall.core.files.atomic import replaced_file
from nostall.store.artefacts import JSON, Artefacts, sync_folder
from nostall.store.errors import BadStore, DamagedIndex, cannot_write
from nostall.store.row import Row, parse_row

VERSION = 1
_LOCK_WAIT_SECONDS = 30.0
"""Time for which SQLite waits for another writer."""
_COMPANIONS = ("-wal", "-shm")
"""Suffixes of SQLite's files beside the table."""
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_SCHEMA", "SQLITE_IOERR_SHORT")
"""Errors that say that the file is not the table; the others concern the disk or other processes.
"""

_COLUMNS = tuple(field.name for field in fields(Row))
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
CREATE TABLE records (
  id TEXT PRIMARY KEY, original TEXT NOT NULL, optimised TEXT NOT NULL, kernel TEXT NOT NULL,
  architecture TEXT NOT NULL, kind TEXT NOT NULL, gpu TEXT, ratio REAL NOT NULL, low REAL NOT NULL,
  created TEXT NOT NULL, source TEXT NOT NULL
);
CREATE INDEX by_original ON records (original);
CREATE INDEX by_optimised ON records (optimised);
PRAGMA user_version = {VERSION};
COMMIT;
"""


class Index:
    """The table of records in the SQLite file ``path``.

    A missing file is an empty table, unless there are files of records: it was then deleted.
    All methods raise :class:`BadStore` if the file cannot be read or written, and
    :class:`DamagedIndex` if it is not a table of records.
    """

    def __init__(self, path: Path, artefacts: Artefacts) -> None:
        """``artefacts``: the files of the records."""
        self.path, self.artefacts = path, artefacts

    def create(self, rows: Sequence[Row] = ()) -> None:
        """Create the table with ``rows``, complete or not at all; replaces an existing file."""
        temporary = self.artefacts.temporary
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            with (
                replaced_file(self.path, temporary) as file,
                self._translate_errors("write"),
                closing(_connect(Path(file.name), "mode=rw")) as database,
            ):
                database.executescript(_SCHEMA)
                _insert(database, rows)
            sync_folder(self.path.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def ensure_exists(self) -> None:
        """Create an empty table if there is none; call it before files of records are written.

        Raises :class:`DamagedIndex` if there is a file that is not a table.
        """
        if self._is_missing():
            self.create()
        else:
            with self._read():
                pass

    def set_aside(self) -> Path | None:
        """Rename the file and SQLite's files beside it; returns the new name, None without a file.

        A log that stays would be applied to the next table of this name.
        """
        if not self.path.exists():
            return None
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        try:
            for suffix in (*_COMPANIONS, ""):
                with suppress(FileNotFoundError):
                    self._companion(suffix).rename(f"{aside}{suffix}")
        except OSError as error:
            raise cannot_write(aside, error) from error
        return aside

    def add(self, rows: Sequence[Row]) -> None:
        """Add all records or none; a record with a known id is left as it is."""
        with self._write() as database:
            _insert(database, rows)

    def remove(self, id: str) -> None:
        """Delete the record with this id, if it exists."""
        with self._write() as database:
            database.execute("DELETE FROM records WHERE id = ?", (id,))

    def find_original(self, sha256: str) -> list[Row]:
        """The records of one original: measured before modelled, then those of this machine's own
        searches before others, whose gains are claims, then by ``low``, largest first.
        """
        return self._rows(
            "WHERE original = ? "
            "ORDER BY kind = 'modelled', source != 'tuned', low DESC, created DESC, id",
            sha256,
        )

    def has_optimised(self, sha256: str) -> bool:
        """Whether a record has this optimised cubin."""
        if self._is_missing():
            return False
        with self._read() as database:
            query = "SELECT EXISTS (SELECT 1 FROM records WHERE optimised = ?)"
            return bool(database.execute(query, (sha256,)).fetchone()[0])

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

    def check(self) -> None:
        """Raise :class:`DamagedIndex` if SQLite finds damage in any page of the file."""
        if self._is_missing():
            return
        with self._read() as database:
            (answer,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise DamagedIndex(self.path, " ".join(str(answer).split())[:200])

    def _rows(self, condition: str, *values: object) -> list[Row]:
        if self._is_missing():
            return []
        with self._read() as database:
            rows = database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM records {condition}", values
            ).fetchall()
        return [parse_row(row, self.path) for row in rows]

    def _is_missing(self) -> bool:
        """Whether there is no table; raises :class:`DamagedIndex` if there are files of records."""
        if self.path.exists():
            return False
        if next(self.artefacts.names(JSON), None) is not None:
            raise DamagedIndex(self.path, "it is missing, and there are records")
        return True

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._translate_errors("read"), closing(self._open_for_reading()) as database:
            _check_version(database, self.path)
            yield database

    def _open_for_reading(self) -> sqlite3.Connection:
        """Open a read-only connection, as immutable if the folder cannot be written.

        SQLite's readers create files beside the table.  In a read-only folder, such as a container
        image, they cannot, and do not need them because nothing changes.
        """
        database = _connect(self.path, "mode=ro")
        try:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return database
        except sqlite3.Error as error:
            database.close()
            if not isinstance(error, sqlite3.OperationalError) or self._has_pending_rows():
                raise
            return _connect(self.path, "immutable=1")

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        if self._is_missing():
            self.create()
        with (
            self._translate_errors("write"),
            closing(_connect(self.path, "mode=rw")) as database,
        ):
            _check_version(database, self.path)
            database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    def _has_pending_rows(self) -> bool:
        """Whether the write-ahead log has rows, which an immutable connection would not see."""
        log = self._companion("-wal")
        return log.exists() and log.stat().st_size > 0

    def _companion(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}{suffix}")

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        """Raise SQLite's errors as :class:`BadStore`."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._bad_store(action, error) from error

    def _bad_store(self, action: str, error: sqlite3.Error) -> BadStore:
        name = getattr(error, "sqlite_errorname", None)
        if name is None or name.startswith(_DAMAGE):  # None: text that is not UTF-8
            return DamagedIndex(self.path, str(error))
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):  # as on a full disk
            remedy = "free space with `nostall store rm`, or set NOSTALL_HOME to a folder elsewhere"
        else:
            remedy = "set NOSTALL_HOME to a folder that can be read and written"
        return BadStore(f"cannot {action} {self.path}: {error}; {remedy}")


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        timeout=_LOCK_WAIT_SECONDS,
        isolation_level=None,
    )


def _insert(database: sqlite3.Connection, rows: Sequence[Row]) -> None:
    placeholders = ", ".join("?" * len(_COLUMNS))
    database.executemany(
        f"INSERT OR IGNORE INTO records ({', '.join(_COLUMNS)}) VALUES ({placeholders})",
        [astuple(row) for row in rows],
    )


def _check_version(database: sqlite3.Connection, path: Path) -> None:
    """Check that the file is a table of a version that this nostall reads and writes.

    Raises :class:`DamagedIndex` for an empty file, which no version of nostall leaves behind, and
    :class:`BadStore` if the version is newer than :data:`VERSION`.
    """
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    if version < VERSION:
        raise DamagedIndex(path, f"{path.stat().st_size} bytes without a table of records")
    if version > VERSION:
        raise BadStore(
            f"{path} has version {version}; this nostall supports up to {VERSION}: upgrade "
            "nostall, or set NOSTALL_HOME to another folder"
        )
