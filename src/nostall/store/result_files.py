"""Write JSON files of cached results, such as tuning records, into the store's folder."""

from __future__ import annotations

from pathlib import Path

from nostall.core.files.atomic import write_atomically
from nostall.store.errors import BadStore


def write_result_file(path: Path, text: bytes) -> None:
    """Write ``text`` and a newline to ``path`` atomically; creates the folder.

    Raises :class:`BadStore` if the folder cannot be created, and
    :class:`~nostall.core.errors.BadRun` if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadStore(
            f"cannot write {path}: {error.strerror}; set NOSTALL_HOME to a writable folder"
        ) from error
    write_atomically(path, text + b"\n")
