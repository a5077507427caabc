"""Atomic file writes: readers and killed writers never see or leave a partial file."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nostall.core.errors import BadRun

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY_ENDING = "?" * 8
"""Pattern of the end of a temporary file's name, behind ``.NAME.``."""


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
    place = target.parent if folder is None else folder
    temporary = place / f".{target.name}.{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_remedy(error: OSError) -> str:
    """What the user can do after a failed write."""
    if error.errno in _DISK_FULL:
        return "free space on this disk, or choose a place on another one"
    return "choose a writable place"
