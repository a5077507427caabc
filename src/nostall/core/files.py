"""Atomic file writes: readers and killed writers never see or leave a partial file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nostall.core.errors import BadRun


def write_atomically(target: Path, data: bytes) -> None:
    """Write ``data`` to ``target``; readers see the old content or the new one, never a part.

    Raises :class:`BadRun` if the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise _not_writable(target, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException as error:  # KeyboardInterrupt, too: it must leave no temporary file
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise _not_writable(target, error) from error


def _not_writable(target: Path, error: OSError) -> BadRun:
    return BadRun(f"cannot write {target}: {error.strerror}; choose a writable place")
