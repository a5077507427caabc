"""Files that others read while they are written, or that a killed process leaves."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nostall.core.errors import BadRun


def write_atomically(target: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new one, never a part."""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise BadRun(f"cannot write {target}: {error.strerror}; choose a writable place") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(target)
    except BaseException as error:  # Ctrl-C, too
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise BadRun(f"cannot write {target}: {error.strerror}; choose a writable place") from error
