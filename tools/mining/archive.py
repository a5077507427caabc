"""Wheels, shared objects, fatbins and cubins as sources of the functions to mine.

A source is read one container at a time, and a container some cubins at a time, so memory is
bounded by ``BATCH_BYTES`` and not by the size of a library.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadInput
from nostall.sass.binary.elf import EM_CUDA, MAX_BYTES
from nostall.sass.binary.fatbin_entries import Entry, cubin_entries, unpack

BATCH_BYTES = 64 << 20
"""Bytes of unpacked cubins that are held at a time, unless one cubin alone is larger."""
BATCH_ENTRIES = 400
_SUFFIXES = (".so", ".cubin", ".fatbin", ".dylib", ".o", ".a")


@dataclass(frozen=True, slots=True)
class Image:
    """One cubin of a source."""

    sm: int
    """The architecture that its container states; 0 if it states none."""
    data: bytes
    """Empty for an architecture that was not asked for."""
    problem: str = ""
    """Why the cubin could not be unpacked."""


def source_name(path: Path) -> str:
    """The name of a source in tables: name and version of a wheel, or the name of the file."""
    if path.suffix == ".whl":
        return "-".join(path.stem.split("-")[:2])
    return path.name


def images(path: Path, architectures: frozenset[int]) -> Iterator[Image]:
    """All cubins of a source for some architectures; others are yielded without their bytes.

    Raises :class:`BadInput` if the file is neither a wheel nor a file with machine code.
    """
    with _containers(path) as containers:
        for container in containers:
            yield from _container_images(container, architectures)


@contextmanager
def _containers(path: Path) -> Iterator[Iterator[Path]]:
    """The files of a source that may hold cubins; those of a wheel are temporary."""
    if not path.is_file():
        raise BadInput(f"{path} is not a file; give a wheel, a shared object, a fatbin or a cubin")
    if not zipfile.is_zipfile(path):
        yield iter((path,))
        return
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, zipfile.ZipFile(path) as wheel:
        yield _extracted(wheel, Path(folder))


def _extracted(wheel: zipfile.ZipFile, folder: Path) -> Iterator[Path]:
    """The members of a wheel that may hold cubins, one at a time, in one temporary file."""
    member_path = folder / "member"
    for member in wheel.infolist():
        name = member.filename.rpartition("/")[2]
        if name.endswith(_SUFFIXES) or ".so." in name:
            with wheel.open(member) as packed, member_path.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            yield member_path


def _container_images(path: Path, architectures: frozenset[int]) -> Iterator[Image]:
    if path.stat().st_size < 64:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        is_elf = data[:4] == b"\x7fELF"
        if is_elf and int.from_bytes(data[18:20], "little") == EM_CUDA:
            if len(data) <= MAX_BYTES:
                yield Image(0, data[:])
            return
        batch: list[Entry] = []
        for entry in cubin_entries(data):
            if entry.sm not in architectures or entry.unpacked_size > MAX_BYTES:
                yield Image(entry.sm, b"")
                continue
            batch.append(entry)
            is_full = sum(e.unpacked_size for e in batch) >= BATCH_BYTES
            if is_full or len(batch) >= BATCH_ENTRIES:
                yield from _unpacked(data, batch)
                batch = []
        yield from _unpacked(data, batch)


def _unpacked(data: mmap.mmap, batch: list[Entry]) -> Iterator[Image]:
    if batch:
        for entry, cubin in zip(batch, unpack(data, batch), strict=True):
            if isinstance(cubin, bytes):
                yield Image(entry.sm, cubin)
            else:
                yield Image(entry.sm, b"", str(cubin).partition(" in ")[0])
