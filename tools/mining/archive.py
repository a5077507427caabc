"""Wheels, shared objects, fatbins and cubins as sources of the functions to mine.

A source is read one container at a time, and a container some cubins at a time, so memory is
bounded by ``BATCH_BYTES`` and not by the size of a library.

Entries of fatbins are found without unpacking them.  A fatbin is a header (magic, version, header
size, size of the rest) and entries, each a header and a payload.  The layout was found by comparing
files with what ``cuobjdump -lelf`` lists, and every size is checked against the file.
``cuobjdump`` decompresses the entries that a caller chooses.
"""

from __future__ import annotations

import mmap
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadBinary, BadInput
from nostall.sass.binary import toolchain
from nostall.sass.binary.elf import EM_CUDA, MAX_BYTES

_MAGIC = bytes.fromhex("50ed55ba")
_HEADER = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_VERSION = 1
_KIND_ELF = 2
_COMPRESSED = 0x2000 | 0x8000
"""Flags of an entry that is compressed with LZ4 or Zstandard."""
_IMAGE_NAME = re.compile(r"\.(\d+)\.(sm_\d+[a-z]?)\.cubin$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One cubin in a fatbin."""

    sm: int
    """Architecture number, such as 90."""
    offset: int
    """File position of the entry's header, in bytes."""
    size: int
    """Bytes of the header and the payload."""
    payload: int
    """File position of the payload, in bytes."""
    unpacked_size: int
    """Bytes of the cubin."""
    is_compressed: bool


def cubin_entries(data: bytes | mmap.mmap) -> Iterator[Entry]:
    """The cubins in all fatbins of a file (PTX and other kinds of entries are left out)."""
    at = data.find(_MAGIC)
    while at >= 0:
        end = at + 4
        if at + _HEADER.size <= len(data):
            _, version, header_size, size = _HEADER.unpack_from(data, at)
            is_header = version == _VERSION and header_size == _HEADER.size
            if is_header and at + header_size + size <= len(data):
                end = at + header_size + size
                yield from _entries(data, at + header_size, end)
        at = data.find(_MAGIC, end)


def _entries(data: bytes | mmap.mmap, start: int, end: int) -> Iterator[Entry]:
    """The cubins of the fatbin whose entries are at ``start`` to ``end``."""
    while start + _ENTRY.size <= end:
        fields = _ENTRY.unpack_from(data, start)
        kind, header_size, payload_size, sm = fields[0], fields[2], fields[3], fields[8]
        flags, unpacked_size = fields[11], fields[13]
        size = header_size + payload_size
        if header_size < _ENTRY.size or start + size > end:
            return
        if kind == _KIND_ELF:
            is_compressed = bool(flags & _COMPRESSED)
            bytes_unpacked = unpacked_size if is_compressed else payload_size
            yield Entry(sm, start, size, start + header_size, bytes_unpacked, is_compressed)
        start += size


def unpack(data: bytes | mmap.mmap, entries: Sequence[Entry]) -> list[bytes | BadBinary]:
    """The cubin of each entry, or the reason why cuobjdump rejects the entry.

    One call of ``cuobjdump`` decompresses all entries, unless it rejects one of them.  Raises
    :class:`~nostall.core.errors.MissingPart` if cuobjdump is not installed.
    """
    compressed = [e for e in entries if e.is_compressed]
    unpacked = dict(zip(compressed, _decompressed(data, compressed), strict=True))
    return [
        unpacked[e] if e.is_compressed else data[e.payload : e.payload + e.unpacked_size]
        for e in entries
    ]


def _decompressed(data: bytes | mmap.mmap, entries: Sequence[Entry]) -> list[bytes | BadBinary]:
    """The cubins of compressed entries; halves the list until each rejected entry is alone."""
    if not entries:
        return []
    try:
        return list(_run_cuobjdump(data, entries))
    except BadBinary as error:
        if len(entries) == 1:
            return [error]
        middle = len(entries) // 2
        return [*_decompressed(data, entries[:middle]), *_decompressed(data, entries[middle:])]


def _run_cuobjdump(data: bytes | mmap.mmap, entries: Sequence[Entry]) -> list[bytes]:
    """The cubins of compressed entries, from one call of cuobjdump."""
    body = b"".join(data[e.offset : e.offset + e.size] for e in entries)
    with tempfile.TemporaryDirectory(prefix="nostall-") as name:
        folder = Path(name)
        header = _HEADER.pack(_MAGIC, _VERSION, _HEADER.size, len(body))
        (folder / "input.fatbin").write_bytes(header + body)
        tool = str(toolchain.find("cuobjdump"))
        toolchain.run([tool, "-xelf", "all", "input.fatbin"], "cuobjdump", cwd=folder)
        numbered = [(int(m[1]), p) for p in folder.iterdir() if (m := _IMAGE_NAME.search(p.name))]
        if len(numbered) != len(entries):
            raise BadBinary(f"cuobjdump unpacked {len(numbered)} of {len(entries)} cubins")
        return [path.read_bytes() for _, path in sorted(numbered)]


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
