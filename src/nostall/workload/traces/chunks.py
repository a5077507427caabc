"""Trace files as lists of events that a JSON decoder takes, in bounded memory.

A trace is one JSON object whose ``traceEvents`` may be gigabytes long.  All that happens here is to
find where events end; decoding is msgspec's work, which also proves every cut: what ends inside a
string or a nested object is not valid JSON, so a wrong cut cannot go unnoticed.
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
"""Bytes that are read, and decoded, at a time: what fits a core's cache decodes fastest."""
PACKED = 1 << 17
"""Bytes of a gzip file that are read at a time."""
MOST_HEAD = 64 << 20
"""Bytes in front of, and behind, the events; also the longest single event."""

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\s*\[\s*(?:\{|\])")
# A string may be cut off by the end of what was read; its brackets must not be counted.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_NEXT_KEY = re.compile(rb'\s*,\s*\{\s*"[^"]{0,40}"')
_BYTE = re.compile(r"byte (\d+)")
_SPACE = b" \t\r\n,"

Progress = Callable[[int], None]
"""Called with the bytes of the file read so far."""
T = TypeVar("T")
Decode = Callable[[bytes | memoryview], T]


@dataclass(slots=True)
class TraceFile:
    """A trace file that is read once, front to back, by :meth:`lists`.

    ``frame`` is the JSON around the events once they are read; ``unpacked`` the bytes seen.
    ``damage`` says where and why reading stopped early (None: the file is whole).
    """

    path: Path
    progress: Progress | None = None
    frame: bytes = b""
    unpacked: int = 0
    damage: str | None = None
    _separator: bytes = field(default=b"", repr=False)

    def lists(self, decode: Decode[T]) -> Iterator[T]:
        """Decoded lists of events, some megabytes at a time.

        ``decode`` gets a JSON list and raises :class:`msgspec.DecodeError` where it is none.  What
        it returns may refer to the text it got, which stays as it was.
        Raises :class:`~nostall.core.errors.BadTrace` where the file holds no list of events;
        damage further on ends the iteration and is kept in ``damage``.
        """
        blocks = self._blocks()
        head, rest, start = self._head(blocks)
        buffer = _framed(rest)
        ended = False
        while True:
            cut = self._guess(buffer)
            found = _decoded(buffer, cut, decode) if cut else None
            closed = None
            if found is None and (ended or cut or len(buffer) >= CHUNK):
                scan = _scan(buffer)
                cut, closed = scan.end, scan.closed
                found = _decoded(buffer, cut, decode) if cut else None
                if cut and found is None:
                    self.damage = _malformed(bytes(buffer[1:cut]), start, decode)
                    return
            if found is not None:
                yield found
            if closed is not None:
                self._close(head, buffer, cut, closed, blocks)
                return
            rest = bytes(buffer[max(cut, 1) : -1]).lstrip(_SPACE)
            start += len(buffer) - 2 - len(rest)
            if ended and not cut:
                self.damage = self.damage or (
                    f"the list of events does not end: the file stops at byte {self.unpacked}"
                )
                return
            if len(rest) > MOST_HEAD:
                self.damage = f"an event at byte {start} is longer than {MOST_HEAD} bytes"
                return
            block = next(blocks, None)
            ended = block is None
            block = block or b""
            if not rest:  # what was read ended right behind an event: its comma comes only now
                start += len(block)
                block = block.lstrip(_SPACE)
                start -= len(block)
            buffer = _framed(rest, block)

    def _head(self, blocks: Iterator[bytes]) -> tuple[bytes, bytes, int]:
        """(what stands before the first event, what was read of the events, their offset)."""
        buffer = b""
        for block in blocks:
            buffer += block
            if bare := _BARE_LIST.match(buffer):
                at = bare.group().index(b"[") + 1
                return b"[", buffer[at:], at
            if found := _EVENTS.search(buffer):
                return buffer[: found.end()], buffer[found.end() :], found.end()
            if len(buffer) > MOST_HEAD:
                break
        if self.damage is not None:
            raise BadTrace(f"{self.path}: {self.damage}; repair the file or fetch it again")
        what = f"has no 'traceEvents' in its first {len(buffer)} bytes" if buffer else "is empty"
        raise BadTrace(
            f"{self.path} {what}; give a trace that torch.profiler's export_chrome_trace wrote, "
            "as .json or .json.gz"
        )

    def _blocks(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                for block in _unpacked(raw) if packed else iter(partial(raw.read, CHUNK), b""):
                    self.unpacked += len(block)
                    yield block
                    if self.progress is not None:
                        self.progress(raw.tell())
        except (EOFError, zlib.error) as error:
            self.damage = f"the gzip stream breaks after {self.unpacked} unpacked bytes ({error})"
        except OSError as error:
            raise BadTrace(f"cannot read {self.path}: {error.strerror or error}") from error

    def _guess(self, buffer: bytearray) -> int:
        """Where the last complete event of ``buffer`` likely ends; 0: no idea."""
        at = buffer.rfind(self._separator) if self._separator else -1
        if at < len(buffer) // 2:  # not learned yet, or events of another form follow
            self._separator = _separator(buffer, max(at + 1, 1))
            at = max(at, buffer.rfind(self._separator) if self._separator else -1)
        return at + 1

    def _close(
        self, head: bytes, buffer: bytearray, end: int, closed: int, blocks: Iterator[bytes]
    ) -> None:
        """Keep what stands around the events; something far longer than a frame is left out."""
        if buffer[max(end, 1) : closed].strip(_SPACE):
            self.damage = f"there is something else than events before byte {self.unpacked}"
        tail = bytes(buffer[closed:-1])
        for block in blocks:
            if len(tail) <= MOST_HEAD:
                tail += block
        self.frame = head + tail


def _unpacked(raw: IO[bytes]) -> Iterator[bytes]:
    """The members of a gzip file, a chunk at a time; :class:`EOFError` where it is cut off."""
    stream, packed = zlib.decompressobj(31), b""
    while True:
        packed = packed or raw.read(PACKED)
        if not packed:
            raise EOFError("the file is cut off")
        if block := stream.decompress(packed, CHUNK):
            yield block
        packed = stream.unconsumed_tail
        if stream.eof:
            packed = (stream.unused_data or raw.read(PACKED)).lstrip(b"\0")
            if not packed:
                return
            stream = zlib.decompressobj(31)


@dataclass(frozen=True, slots=True)
class _Scan:
    """``end``: behind the last complete event; ``closed``: the bracket that ends the list."""

    end: int
    closed: int | None


def _framed(*texts: bytes) -> bytearray:
    """The texts behind each other, with room for a bracket on either side."""
    return bytearray().join((b"[", *texts, b" "))


def _scan(buffer: bytearray) -> _Scan:
    """Follow brackets and strings from between two events; exact, and ten times slower."""
    depth, end = 0, 0
    for token in _TOKEN.finditer(buffer, 1):
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


def _separator(buffer: bytearray, start: int) -> bytes:
    """How events follow each other from ``start`` on: from a closing brace to the next first key.

    Nested objects have another indentation or another first key, so that looking for these bytes
    from the end of a buffer finds a boundary without following every bracket.
    """
    depth = 0
    for token in _TOKEN.finditer(buffer, start):
        first = buffer[token.start()]
        depth += (first in b"{[") - (first in b"}]")
        if first in b"}]" and depth <= 0:
            found = _NEXT_KEY.match(buffer, token.end())
            if depth == 0 or not found:
                return b"}" + bytes(found.group()) if found else b""
            depth = 0  # ``start`` was just inside an event
    return b""


def _decoded(buffer: bytearray, cut: int, decode: Decode[T]) -> T | None:
    """The events before ``cut``; the bracket behind them is written in place, without a copy."""
    behind = buffer[cut]
    buffer[cut] = ord("]")
    try:
        return decode(memoryview(buffer)[: cut + 1])
    except msgspec.DecodeError:
        return None
    finally:
        buffer[cut] = behind


def _malformed(events: bytes, start: int, decode: Decode[T]) -> str:
    """Where in the file the JSON breaks."""
    try:
        decode(b"[%b]" % events)
    except msgspec.DecodeError as error:
        at = _BYTE.search(str(error))
        offset = start + max(int(at[1]) - 1, 0) if at else start
        return f"malformed JSON at byte {offset} ({_BYTE.sub('', str(error)).strip(' ()')})"
    raise AssertionError("events that decode are not malformed")
