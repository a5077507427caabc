"""Text of a file in blocks: decompression of gzip, byte order marks, UTF-16."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from nostall.core.errors import BadInput
from nostall.core.files.atomic import check_content

CHUNK = 1 << 20
"""Bytes that are read and decoded at a time; a piece that fits the CPU cache decodes fastest."""
GZIP_CHUNK = 1 << 17
"""Bytes of a gzip file that are read at a time."""
_GZIP_MAGIC = b"\x1f\x8b"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that have been read."""


@dataclass(slots=True)
class TextBlocks:
    """Iterator over the UTF-8 text of a file; damage of the compression ends it."""

    path: Path
    progress: Progress | None = None
    error: type[BadInput] = BadInput
    """Class of the error for a file that cannot be read."""
    chunk: int = CHUNK
    """Bytes that are read at a time."""
    size: int = 0
    """Bytes of text so far."""
    damage: str | None = None
    """Cause if a gzip stream breaks; None: no damage."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the text.  Raises ``self.error`` if the file cannot be read."""
        check_content(self.path, self.error)
        for block in _to_utf8(self._unpacked()):
            self.size += len(block)
            yield block

    def _unpacked(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                is_gzip = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                plain = iter(partial(file.read, self.chunk), b"")
                for block in _decompress(file) if is_gzip else plain:
                    yield block
                    if self.progress is not None:
                        self.progress(file.tell())
        except (EOFError, zlib.error) as error:
            self.damage = f"the gzip stream breaks after {self.size} unpacked bytes ({error})"
        except OSError as error:
            raise self.error(
                f"cannot read {self.path}: {error.strerror or error}; check the path and its "
                "permissions"
            ) from error


def _to_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks without a byte order mark; UTF-16 is converted."""
    first = b""
    for block in blocks:
        first += block
        if len(first) >= len(codecs.BOM_UTF8):
            break
    if first.startswith(_UTF16_MARKS):
        decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
        yield decoder.decode(first).encode(errors="replace")
        for block in blocks:
            yield decoder.decode(block).encode(errors="replace")
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from blocks


def _decompress(file: IO[bytes]) -> Iterator[bytes]:
    """The text of all members of a gzip file.

    Raises :class:`EOFError` if the file is cut off, and :class:`zlib.error` after the last byte
    that can be unpacked.
    """
    stream, packed = zlib.decompressobj(31), b""
    while True:
        packed = packed or file.read(GZIP_CHUNK)
        if not packed:
            raise EOFError("the file is cut off")
        before = stream.copy()
        try:
            block = stream.decompress(packed, CHUNK)
        except zlib.error:
            yield _unpack_until_damage(before, packed)
            raise
        if block:
            yield block
        packed = stream.unconsumed_tail
        if stream.eof:
            packed = (stream.unused_data or file.read(GZIP_CHUNK)).lstrip(b"\0")
            if not packed:
                return
            stream = zlib.decompressobj(31)


def _unpack_until_damage(stream: zlib._Decompress, packed: bytes) -> bytes:
    """All text before the damaged byte, unpacked a byte at a time."""
    parts: list[bytes] = []
    for position in range(len(packed)):
        try:
            parts.append(stream.decompress(packed[position : position + 1]))
        except zlib.error:
            break
    return b"".join(parts)
