"""Content-addressed files: each is named by the sha256 of its content and written atomically."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from nostall.core.files.atomic import replaced_file
from nostall.store.errors import BadStore, cannot_write

CUBIN, JSON, RECIPE = "cubin", "json", "recipe"
"""Suffixes of the store's files."""
SHA256_PATTERN = r"^[0-9a-f]{64}$"
_SHA256 = re.compile(SHA256_PATTERN)
_SUFFIX = re.compile(r"[a-z]+")
_STALE_SECONDS = 3600.0
"""Age at which a temporary or unreferenced file is the remains of a killed writer."""


def content_hash(data: bytes) -> str:
    """The sha256 of ``data`` as hexadecimal digits: the name of its file."""
    return hashlib.sha256(data).hexdigest()


class Artefacts:
    """A folder of immutable files ``<first two digits>/<sha256>.<suffix>``.

    The names have suffixes because Triton and CuPy infer the kind of a file from its suffix.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.temporary = root / "tmp"
        """Folder of files that are being written."""

    def path(self, sha256: str, suffix: str) -> Path:
        """Where a file with this hash is, or would be.

        Raises :class:`BadStore` if ``sha256`` or ``suffix`` does not have the form of one, so a
        damaged index cannot name a file outside the folder.
        """
        if not is_sha256(sha256) or not _SUFFIX.fullmatch(suffix):
            raise BadStore(f"{sha256[:80]!r} is not a sha256 in hexadecimal digits")
        return self.root / sha256[:2] / f"{sha256}.{suffix}"

    def put(self, data: bytes, suffix: str) -> str:
        """Write ``data`` and return its hash; a damaged file is replaced.

        Raises :class:`BadStore` if the file cannot be written; no part of it is left.
        """
        sha256 = content_hash(data)
        target = self.path(sha256, suffix)
        with suppress(OSError):
            if target.read_bytes() == data:
                return sha256
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.temporary.mkdir(exist_ok=True)
            with replaced_file(target, self.temporary) as file:
                file.write(data)
            sync_folder(target.parent)
            sync_folder(self.root)
        except OSError as error:
            raise cannot_write(target, error) from error
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
                f"{path} was changed: the hash of its content is not its name; "
                "`nostall store verify --remove` removes such records"
            )
        return data

    def remove(self, sha256: str, suffix: str) -> None:
        """Delete a file, if it exists.  Raises :class:`BadStore` if it cannot be deleted."""
        path = self.path(sha256, suffix)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise BadStore(f"cannot delete {path}: {error.strerror}") from error

    def names(self, suffix: str) -> Iterator[str]:
        """The hashes of all files with this suffix, as their names say."""
        for path in self._files():
            if path.suffix == f".{suffix}":
                yield path.stem

    def sweep(self) -> None:
        """Delete temporary files of killed writers."""
        with suppress(OSError):
            for path in self.temporary.iterdir():
                _remove_if_stale(path)

    def collect(self, referenced: Collection[str]) -> None:
        """Delete files whose hash is not in ``referenced``, except young ones."""
        for path in self._files():
            if path.stem not in referenced:
                _remove_if_stale(path)

    def _files(self) -> Iterator[Path]:
        """All content-addressed files; files and folders with other names are left out."""
        with suppress(OSError):
            for folder in self.root.iterdir():
                if len(folder.name) == 2 and folder.is_dir():
                    yield from (path for path in folder.iterdir() if is_sha256(path.stem))


def is_sha256(text: str) -> bool:
    """Whether ``text`` is 64 lower-case hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


def _remove_if_stale(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _STALE_SECONDS:
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, so that a new file name survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
