"""Content-addressed files: each is named by the sha256 of its content and written atomically."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nostall.store.errors import BadStore

_STALE_SECONDS = 3600.0
"""Age at which a temporary file is the remains of a killed writer."""


def content_hash(data: bytes) -> str:
    """The sha256 of ``data`` as hexadecimal digits: the name of its file."""
    return hashlib.sha256(data).hexdigest()


class Artefacts:
    """A folder of immutable files ``<first two digits>/<sha256>.<suffix>``.

    The names have suffixes because Triton and CuPy infer the kind of a file from its suffix.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root / "tmp"

    def path(self, sha256: str, suffix: str) -> Path:
        """Where a file with this hash is, or would be."""
        return self.root / sha256[:2] / f"{sha256}.{suffix}"

    def put(self, data: bytes, suffix: str) -> str:
        """Write ``data`` and return its hash; a damaged file is replaced.

        Raises :class:`BadStore` if the file cannot be written.
        """
        sha256 = content_hash(data)
        target = self.path(sha256, suffix)
        with suppress(OSError):
            if target.read_bytes() == data:
                return sha256
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.mkdir(exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._temporary)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
            _sync_folder(target.parent)
            _sync_folder(self.root)
        except OSError as error:
            raise BadStore(
                f"cannot write {target}: {error.strerror}; set NOSTALL_HOME to a writable folder"
            ) from error
        return sha256

    def file(self, data: bytes, suffix: str) -> Path:
        """As :meth:`put`, but returns the path."""
        return self.path(self.put(data, suffix), suffix)

    def get(self, sha256: str, suffix: str) -> bytes:
        """The content of a file.

        Raises :class:`BadStore` if the file cannot be read or its content has another hash.
        """
        path = self.path(sha256, suffix)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadStore(f"{path} cannot be read: {error.strerror}") from error
        if content_hash(data) != sha256:
            raise BadStore(
                f"{path} was changed: the hash of its content is not its name; remove the record"
            )
        return data

    def remove(self, sha256: str, suffix: str) -> None:
        """Delete a file, if it exists."""
        self.path(sha256, suffix).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Delete temporary files of killed writers."""
        with suppress(OSError):
            for path in self._temporary.iterdir():
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                        path.unlink()


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that a new file name survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
