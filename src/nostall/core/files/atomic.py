"""Atomic file writes: readers and killed writers never see or leave a partial file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nostall.core.errors import BadRun

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
"""Name of a temporary file: ``.NAME.XXXXXXXX.partial``."""


def write_atomically(target: Path, data: bytes) -> None:
    """Write ``data`` to ``target``; readers see the old content or the new one, never a part.

    Raises :class:`BadRun` if the file cannot be written.
    """
    try:
        with replaced_file(target) as file:
            file.write(data)
    except OSError as error:
        raise BadRun(f"cannot write {target}: {error.strerror}; {write_remedy(error)}") from error


@contextmanager
def replaced_file(target: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``target`` when the context ends without an exception.

    It is written in ``folder`` (by default that of ``target``), which must be on the same file
    system, and deleted after an exception, :class:`KeyboardInterrupt` included.  Its mode follows
    the umask.  Raises :class:`OSError` if the file cannot be written.
    """
    temporary, file = _open_temporary(target.parent if folder is None else folder, target.name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(target)  # still locked, so that no other process removes it
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _open_temporary(folder: Path, name: str) -> tuple[Path, BinaryIO]:
    """Create a temporary file that this process locks.

    Another process may remove it before it is locked (:func:`remove_abandoned`); a new one is then
    created.
    """
    while True:
        path = folder / f".{name}.{secrets.token_hex(4)}.partial"
        file = path.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Delete temporary files in ``folder`` whose writers have ended."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                with suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is written
                    path.unlink()


def write_remedy(error: OSError) -> str:
    """What the user can do after a failed write."""
    if error.errno in _DISK_FULL:
        return "free space on this disk, or choose a place on another one"
    return "choose a writable place"
