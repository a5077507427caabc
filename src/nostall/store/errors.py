"""Errors of the store and of bundles; both are bad input (exit code 2)."""

from __future__ import annotations

import errno
from pathlib import Path

from nostall.core.errors import BadInput


class BadStore(BadInput):
    """The store cannot be read or written, or lacks the requested record."""


class DamagedIndex(BadStore):
    """The index of the store is not readable; the records' files can be."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"the index {path} is damaged ({reason}); `nostall store repair` builds it anew from "
            "the records' files"
        )


class BadBundle(BadInput):
    """A deployment bundle is damaged, was changed, or has another format."""


def cannot_write(path: Path, error: OSError) -> BadStore:
    """The error of a write that the operating system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space with `nostall store rm`, or set NOSTALL_HOME to a folder elsewhere"
    elif error.errno == errno.ELOOP:
        remedy = "it is a symbolic link, which nostall does not follow; remove it"
    else:
        remedy = "set NOSTALL_HOME to a writable folder"
    return BadStore(f"cannot write {path}: {error.strerror}; {remedy}")
