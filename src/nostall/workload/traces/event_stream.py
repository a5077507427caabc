"""Streaming reader for the events of a trace file, in bounded memory.

A trace is one JSON object whose ``traceEvents`` list can be gigabytes long.  This module cuts the
text of the list between events, and msgspec decodes each piece.  A cut inside a string or a nested
object gives invalid JSON, so msgspec detects every wrong cut.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from nostall.core.errors import BadTrace

CHUNK = 1 << 20
"""Bytes that are read and decoded at a time; a piece that fits the CPU cache decodes fastest."""
GZIP_CHUNK = 1 << 17
"""Bytes of a gzip file that are read at a time."""
MAX_FRAME = 64 << 20
"""Limit in bytes of the text before the events, of the text after them, and of one event."""

_EVENTS_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\s*\[\s*(?:\{|\])")
# A string at the end of the buffer can be incomplete; the brackets in it must not be counted.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_NEXT_KEY = re.compile(rb'\s*,\s*\{\s*"[^"]{0,40}"')
_BYTE_OFFSET = re.compile(r"byte (\d+)")
_SEPARATORS = b" \t\r\n,"

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that have been read."""
T = TypeVar("T")
Decode = Callable[[bytes | memoryview], T]


@dataclass(slots=True)
class TraceFile:
    """A trace file; :meth:`event_lists` reads it once from start to end."""

    path: Path
    progress: Progress | None = None
    frame: bytes = b""
    """The JSON object without the events; complete after all events are read."""
    unpacked: int = 0
    """Bytes read so far, after decompression."""
    damage: str | None = None
    """Position and cause if reading stopped early; None: no damage."""
    _separator: bytes = field(default=b"", repr=False)
    """The text between two events, learned from the file (see :func:`_find_separator`)."""

    def event_lists(self, decode: Decode[T]) -> Iterator[T]:
        """Decode the events, a list of about :data:`CHUNK` bytes at a time.

        ``decode`` gets the text of a JSON list and raises :class:`msgspec.DecodeError` if it is not
        valid.  Its result may refer to the text, which does not change later.
        Raises :class:`~nostall.core.errors.BadTrace` if the file has no list of events.  Damage
        after the start of the list ends the iteration and sets ``damage``.
        """
        blocks = self._blocks()
        head, rest, start = self._read_head(blocks)
        # ``start`` is the offset of buffer[1] in the decompressed file.
        buffer = _framed(rest)
        at_end = False
        while True:
            cut = self._guess_cut(buffer)
            events = _decode_prefix(buffer, cut, decode) if cut else None
            list_end = None
            if events is None and (at_end or cut or len(buffer) >= CHUNK):
                scan = _scan(buffer)
                cut, list_end = scan.events_end, scan.list_end
                events = _decode_prefix(buffer, cut, decode) if cut else None
                if cut and events is None:
                    self.damage = _describe_error(bytes(buffer[1:cut]), start, decode)
                    return
            if events is not None:
                yield events
            if list_end is not None:
                self._read_tail(head, buffer, cut, list_end, blocks)
                return
            rest = bytes(buffer[max(cut, 1) : -1]).lstrip(_SEPARATORS)
            start += len(buffer) - 2 - len(rest)
            if at_end and not cut:
                self.damage = self.damage or (
                    f"the list of events does not end: the file stops at byte {self.unpacked}"
                )
                return
            if len(rest) > MAX_FRAME:
                self.damage = f"an event at byte {start} is longer than {MAX_FRAME} bytes"
                return
            block = next(blocks, None)
            at_end = block is None
            block = block or b""
            if not rest:  # the last block ended after an event, so this one can start with a comma
                start += len(block)
                block = block.lstrip(_SEPARATORS)
                start -= len(block)
            buffer = _framed(rest, block)

    def _read_head(self, blocks: Iterator[bytes]) -> tuple[bytes, bytes, int]:
        """(text before the first event, text after it that was read, offset of the first event)."""
        buffer = b""
        for block in blocks:
            buffer += block
            if bare := _BARE_LIST.match(buffer):
                start = bare.group().index(b"[") + 1
                return b"[", buffer[start:], start
            if match := _EVENTS_START.search(buffer):
                return buffer[: match.end()], buffer[match.end() :], match.end()
            if len(buffer) > MAX_FRAME:
                break
        if self.damage is not None:
            raise BadTrace(f"{self.path}: {self.damage}; repair the file or fetch it again")
        problem = f"has no 'traceEvents' in its first {len(buffer)} bytes" if buffer else "is empty"
        raise BadTrace(
            f"{self.path} {problem}; give a trace that torch.profiler's export_chrome_trace "
            "wrote, as .json or .json.gz"
        )

    def _blocks(self) -> Iterator[bytes]:
        """The text of the file, decompressed if it is gzip, a block at a time."""
        try:
            with self.path.open("rb") as file:
                is_gzip = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                blocks = _decompress(file) if is_gzip else iter(partial(file.read, CHUNK), b"")
                for block in blocks:
                    self.unpacked += len(block)
                    yield block
                    if self.progress is not None:
                        self.progress(file.tell())
        except (EOFError, zlib.error) as error:
            self.damage = f"the gzip stream breaks after {self.unpacked} unpacked bytes ({error})"
        except OSError as error:
            raise BadTrace(f"cannot read {self.path}: {error.strerror or error}") from error

    def _guess_cut(self, buffer: bytearray) -> int:
        """Position after the last separator between events in ``buffer``; 0 if there is none."""
        position = buffer.rfind(self._separator) if self._separator else -1
        if position < len(buffer) // 2:
            # The separator is not known yet, or the format of the events has changed.
            self._separator = _find_separator(buffer, max(position + 1, 1))
            last = buffer.rfind(self._separator) if self._separator else -1
            position = max(position, last)
        return position + 1

    def _read_tail(
        self, head: bytes, buffer: bytearray, end: int, list_end: int, blocks: Iterator[bytes]
    ) -> None:
        """Read the rest of the file and set ``frame``; a tail beyond the limit is cut off."""
        if buffer[max(end, 1) : list_end].strip(_SEPARATORS):
            self.damage = f"there is something else than events before byte {self.unpacked}"
        tail = bytes(buffer[list_end:-1])
        for block in blocks:
            if len(tail) <= MAX_FRAME:
                tail += block
        self.frame = head + tail


def _decompress(file: IO[bytes]) -> Iterator[bytes]:
    """The text of all members of a gzip file.  Raises :class:`EOFError` if the file is cut off."""
    stream, packed = zlib.decompressobj(31), b""
    while True:
        packed = packed or file.read(GZIP_CHUNK)
        if not packed:
            raise EOFError("the file is cut off")
        if block := stream.decompress(packed, CHUNK):
            yield block
        packed = stream.unconsumed_tail
        if stream.eof:
            packed = (stream.unused_data or file.read(GZIP_CHUNK)).lstrip(b"\0")
            if not packed:
                return
            stream = zlib.decompressobj(31)


@dataclass(frozen=True, slots=True)
class _Scan:
    """Positions in a buffer of events."""

    events_end: int
    """After the last complete event; 0 if there is none."""
    list_end: int | None
    """The bracket that closes the list; None if it is not in the buffer."""


def _framed(*texts: bytes) -> bytearray:
    """The concatenated texts with one byte before for ``[`` and one after for ``]``."""
    return bytearray().join((b"[", *texts, b" "))


def _scan(buffer: bytearray) -> _Scan:
    """Find the end of the last complete event by following all strings and brackets.

    Exact for any format of the events, but ten times slower than :meth:`TraceFile._guess_cut`.
    """
    depth, end = 0, 0
    for token in _STRING_OR_BRACKET.finditer(buffer, 1):
        first = buffer[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0:
                end = token.end()
            elif depth < 0:
                return _Scan(end, token.start())
    return _Scan(end, None)


def _find_separator(buffer: bytearray, start: int) -> bytes:
    """The text between two events after ``start``: from a closing brace to the next first key.

    Nested objects have another indentation or another first key, so the last occurrence of this
    text in a buffer is a boundary between events, found without following every bracket.
    """
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(buffer, start):
        first = buffer[token.start()]
        depth += (first in b"{[") - (first in b"}]")
        if first in b"}]" and depth <= 0:
            next_key = _NEXT_KEY.match(buffer, token.end())
            if depth == 0 or not next_key:
                return b"}" + bytes(next_key.group()) if next_key else b""
            depth = 0  # ``start`` was inside an event
    return b""


def _decode_prefix(buffer: bytearray, cut: int, decode: Decode[T]) -> T | None:
    """Decode the events before ``cut``, or return None if they are not valid JSON.

    The closing bracket is written into the buffer and removed again, which saves a copy.
    """
    saved = buffer[cut]
    buffer[cut] = ord("]")
    try:
        return decode(memoryview(buffer)[: cut + 1])
    except msgspec.DecodeError:
        return None
    finally:
        buffer[cut] = saved


def _describe_error(events: bytes, start: int, decode: Decode[T]) -> str:
    """The JSON error in ``events``, with its offset in the file; ``start`` is that of the text."""
    try:
        decode(b"[%b]" % events)
    except msgspec.DecodeError as error:
        match = _BYTE_OFFSET.search(str(error))
        offset = start + max(int(match[1]) - 1, 0) if match else start
        cause = _BYTE_OFFSET.sub("", str(error)).strip(" ()")
        return f"malformed JSON at byte {offset} ({cause})"
    raise AssertionError("the events decode without an error")
