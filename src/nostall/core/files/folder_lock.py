"""Lock of a folder: one process writes it at a time; the lock ends with the process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from nostall.core.errors import BadRun

LOCK_FILE = "lock"
"""File of a folder that its writer locks.  It stays, because a deletion could race with a lock."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without locks."""


class FolderLock:
    """The lock of the process that writes a folder; released by :meth:`release` or by its end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock; does nothing if this object has it.

        Raises :class:`BadRun`, which names the other process, if that has the lock, or if the
        folder cannot be written.  On a file system without locks nothing is locked.
        """
        if self._handle is not None:
            return
        try:
            handle = os.open(self.path, _FLAGS, 0o666)
        except OSError as error:
            raise BadRun(
                f"cannot write to {self.path.parent}: {error.strerror}; choose a writable "
                "directory with --out"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._note_owner(handle)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                owner = self._owner(handle)
                os.close(handle)
                raise BadRun(
                    f"{self.path.parent} is being written by {owner}; wait until it ends, stop it "
                    "(Ctrl-C keeps its results), or choose another directory with --out"
                ) from error
        self._handle = handle

    def release(self) -> None:
        """Give the lock back, if this object has it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.release()

    @staticmethod
    def _note_owner(handle: int) -> None:
        with suppress(OSError):  # as on a full disk; the name is only for the message
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    @staticmethod
    def _owner(handle: int) -> str:
        with suppress(OSError):
            text = os.pread(handle, 200, 0).decode(errors="replace").strip()
            if text:
                return text
        return "another process"


def is_locked(folder: Path) -> bool:
    """Whether a process writes ``folder`` now."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _UNSUPPORTED
    finally:
        os.close(handle)
    return False
