"""Files named by the sha256 of what is in them; they appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from nostall.store.errors import BadStore

_LEFT_BEHIND = 3600.0
"""Seconds after which a temporary file belongs to no living writer."""


def name(data: bytes) -> str:
    """The sha256 that names ``data``."""
    return hashlib.sha256(data).hexdigest()


class Artefacts:
    """A folder of immutable files ``<first two digits>/<sha256>.<suffix>``.

    The suffix is part of the name because Triton and CuPy tell file kinds by it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary = root / "tmp"

    def path(self, sha256: str, suffix: str) -> Path:
        return self.root / sha256[:2] / f"{sha256}.{suffix}"

    def put(self, data: bytes, suffix: str) -> str:
        """Keep ``data``; its name.  A file that is there but damaged is replaced."""
        sha256 = name(data)
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
            _sync(target.parent)
            _sync(self.root)
        except OSError as error:
            raise BadStore(
                f"cannot write {target}: {error.strerror}; set NOSTALL_HOME to a writable folder"
            ) from error
        return sha256

    def file(self, data: bytes, suffix: str) -> Path:
        """Where ``data`` is, after :meth:`put`."""
        return self.path(self.put(data, suffix), suffix)

    def get(self, sha256: str, suffix: str) -> bytes:
        """The bytes of a file, checked against its name; :class:`BadStore` when they differ."""
        path = self.path(sha256, suffix)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadStore(f"{path} cannot be read: {error.strerror}") from error
        if name(data) != sha256:
            raise BadStore(f"{path} was changed: its hash is not its name; remove the record")
        return data

    def remove(self, sha256: str, suffix: str) -> None:
        self.path(sha256, suffix).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        with suppress(OSError):
            for path in self._temporary.iterdir():
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _LEFT_BEHIND:
                        path.unlink()


def _sync(folder: Path) -> None:
    """Make a new name in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
