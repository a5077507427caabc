"""Streaming reader for the events of a trace file, in bounded memory.

A trace is one JSON object whose ``traceEvents`` list can be gigabytes long.  This module cuts the
text of the list between events, and msgspec decodes each piece.  A cut inside a string or a nested
object gives invalid JSON, so msgspec detects every wrong cut.  Text that is not valid at any cut is
damaged; :mod:`~nostall.workload.traces.stream.salvage` recovers the events in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import CHUNK, Progress, TextBlocks
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.stream.salvage import (
    INVALID,
    STRING_OR_BRACKET,
    Decode,
    EventBorders,
    T,
    ends_list,
    repair,
    salvage,
)

MAX_FRAME = 64 << 20
"""Limit in bytes of the text before the events and of the text after them."""
MAX_EVENT = 16 << 20
"""Limit in bytes of one event."""
_HEAD = 4 << 20
"""Bytes before the first event in which ``traceEvents`` is expected."""
_KEPT = 4096
"""Bytes of a text without events that are kept, because an event can start in them."""

_EVENTS_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_LIST = re.compile(rb"\s*\[\s*(?:\{|\])")
_FIRST_EVENT = re.compile(rb'\{\s*"[^"{}\\]{1,40}"\s*:[^{}]{0,4096}?"ph"\s*:|\{\s*"ph"\s*:')
_FIRST_KEY = re.compile(rb'[\s,]*\{\s*"([^"\\]{1,40})"\s*:')
_NEXT_KEY = re.compile(rb'\s*,\s*\{\s*"[^"]{0,40}"')
_SEPARATORS = b" \t\r\n,"


@dataclass(slots=True)
class TraceFile:
    """A trace file; :meth:`event_lists` reads it once from start to end."""

    path: Path
    progress: Progress | None = None
    chunk: int = CHUNK
    """Bytes that are read at a time."""
    frame: bytes = b""
    """The text before and after the events; complete after all events are read."""
    lost: int = 0
    """Events that are not valid JSON."""
    first_damage: int | None = None
    """Offset of the first damage in the text of the file."""
    repaired: int = 0
    """Characters and numbers that are not valid JSON and were replaced."""
    head_damage: str | None = None
    end_damage: str | None = None
    """Cause if the list of events does not end; None: it does."""
    _borders: EventBorders = field(default_factory=EventBorders.before, repr=False)
    _separator: bytes = field(default=b"", repr=False)
    """The text between two events, learned from the file (see :func:`_find_separator`)."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Damage of the file, a sentence each."""
        remarks = [self.head_damage] if self.head_damage else []
        where = f", first at byte {self.first_damage}" if self.first_damage is not None else ""
        if self.lost:
            skipped = "is not valid JSON and is" if self.lost == 1 else "are not valid JSON and are"
            remarks.append(f"{pluralize(self.lost, 'event')} {skipped} skipped{where}")
        if self.repaired:
            places = pluralize(self.repaired, "place")
            verb = "is" if self.repaired == 1 else "are"
            remarks.append(
                f"{places} in events {verb} not valid JSON and {verb} replaced"
                f"{'' if self.lost else where}"
            )
        if self.end_damage:
            remarks.append(self.end_damage)
        return tuple(remarks)

    def event_lists(self, decode: Decode[T]) -> Iterator[T]:
        """Decode the events, a list of about :data:`CHUNK` bytes at a time.

        ``decode`` gets the text of a JSON list and raises :class:`msgspec.DecodeError` if it is not
        valid.  Its result may refer to the text, which does not change later.
        Raises :class:`~nostall.core.errors.BadTrace` if the file has no list of events.  Damaged
        events are skipped and counted.
        """
        text = TextBlocks(self.path, self.progress, BadTrace, self.chunk)
        blocks = iter(text)
        self.frame, rest, start = self._read_head(blocks, text)
        if first := _FIRST_KEY.match(rest):
            self._borders = EventBorders.before(first[1].decode(errors="replace"))
        at_end = False
        while True:
            # ``start`` is the offset of buffer[1] in the text of the file.
            buffer = _framed(rest)
            part = self._decode_part(buffer, start, decode, at_end)
            yield from part.lists
            if part.list_end is not None:
                self._read_tail(buffer, part, blocks)
                return
            rest = bytes(buffer[max(part.cut, 1) : -1]).lstrip(_SEPARATORS)
            start += len(buffer) - 2 - len(rest)
            if at_end and (not rest or not part.cut):
                self.end_damage = text.damage or (
                    f"the list of events does not end: the file stops at byte {text.size}"
                )
                return
            more = _read_more(blocks, len(rest))
            at_end = not more
            if not rest:  # the last block ended after an event, so this one can start with a comma
                start += len(more)
                more = more.lstrip(_SEPARATORS)
                start -= len(more)
            rest += more

    def _decode_part(
        self, buffer: bytearray, start: int, decode: Decode[T], at_end: bool
    ) -> _Part[T]:
        """Decode the complete events of a buffer."""
        cut = self._guess_cut(buffer)
        events = _decode_prefix(buffer, cut, decode) if cut else None
        if events is not None:
            return _Part([events], cut)
        if cut and (events := self._decode_repaired(bytes(buffer[1:cut]), decode)) is not None:
            return _Part([events], cut)
        if not (at_end or cut or len(buffer) >= self.chunk):
            return _Part([], 0)
        scan = _scan(buffer)
        events = _decode_prefix(buffer, scan.events_end, decode) if scan.events_end else None
        lists = [] if events is None else [events]
        is_valid = bool(lists) or not scan.events_end
        if is_valid and scan.list_end is not None and self._is_list_end(buffer, scan, at_end):
            return _Part(lists, scan.events_end, scan.list_end)
        if lists:  # the text after them is decoded with the next part
            return _Part(lists, scan.events_end)
        if is_valid and scan.list_end is None and not at_end and len(buffer) <= MAX_EVENT:
            return _Part([], 0)
        return self._salvage(buffer, start, decode, at_end)

    def _decode_repaired(self, text: bytes, decode: Decode[T]) -> T | None:
        """Decode events in which only characters or numbers are not valid."""
        repaired, positions = repair(text)
        if repaired == text:
            return None
        try:
            events = decode(b"[%b]" % repaired)
        except INVALID:
            return None
        self.repaired += max(len(positions), 1)
        return events

    def _is_list_end(self, buffer: bytearray, scan: _Scan, at_end: bool) -> bool:
        """Whether the bracket that the scan found closes the list, and no damage is before it."""
        assert scan.list_end is not None
        is_next = not buffer[max(scan.events_end, 1) : scan.list_end].strip(_SEPARATORS)
        # The byte after the text is the frame's, so the text is copied without it.
        text = bytes(buffer[scan.list_end : -1])
        return is_next and ends_list(text, 0, at_end) is not None

    def _salvage(self, buffer: bytearray, start: int, decode: Decode[T], at_end: bool) -> _Part[T]:
        text = bytes(buffer[1:-1])
        result = salvage(text, decode, self._borders, at_end=at_end)
        self.lost += result.lost
        self.repaired += result.repaired
        if result.first_damage is not None and self.first_damage is None:
            self.first_damage = start + result.first_damage
        consumed = result.consumed
        if not consumed and len(text) > MAX_EVENT:
            consumed = len(text) - _KEPT
            self.lost += 1
            self.first_damage = start if self.first_damage is None else self.first_damage
        list_end = None if result.list_end is None else result.list_end + 1
        return _Part(result.lists, consumed + 1 if consumed else 0, list_end)

    def _read_head(self, blocks: Iterator[bytes], text: TextBlocks) -> tuple[bytes, bytes, int]:
        """(text before the first event, text after it that was read, offset of the first event)."""
        buffer = bytearray()
        searched = 0
        for block in blocks:
            buffer += block
            if not searched and (bare := _BARE_LIST.match(buffer)):
                start = bare.group().index(b"[") + 1
                return b"[", bytes(buffer[start:]), start
            if match := _EVENTS_START.search(buffer, searched):
                return bytes(buffer[: match.end()]), bytes(buffer[match.end() :]), match.end()
            has_event = len(buffer) > _HEAD and _FIRST_EVENT.search(buffer, searched)
            if has_event or len(buffer) > MAX_FRAME:
                break
            searched = max(0, len(buffer) - _KEPT)
        if event := _FIRST_EVENT.search(buffer):
            # The key of the list is damaged, but its events may not be.
            self.head_damage = "the key 'traceEvents' before the first event is damaged"
            return bytes(buffer[: event.start()]), bytes(buffer[event.start() :]), event.start()
        raise BadTrace(self._without_events(len(buffer), text.damage))

    def _without_events(self, size: int, damage: str | None) -> str:
        if damage is not None:
            return f"{self.path}: {damage}; repair the file or fetch it again"
        problem = f"has no 'traceEvents' in its first {size} bytes" if size else "is empty"
        return (
            f"{self.path} {problem}; give a trace that torch.profiler's export_chrome_trace "
            "wrote, as .json or .json.gz"
        )

    def _guess_cut(self, buffer: bytearray) -> int:
        """Position after the last separator between events in ``buffer``; 0 if there is none."""
        position = buffer.rfind(self._separator) if self._separator else -1
        if position < len(buffer) // 2:
            # The separator is not known yet, or the format of the events has changed.
            self._separator = _find_separator(buffer, max(position + 1, 1))
            last = buffer.rfind(self._separator) if self._separator else -1
            position = max(position, last)
        return position + 1

    def _read_tail(self, buffer: bytearray, part: _Part[T], blocks: Iterator[bytes]) -> None:
        """Read the rest of the file and complete ``frame``; a tail beyond the limit is cut off."""
        tail = buffer[part.list_end : -1]
        for block in blocks:
            if len(tail) <= MAX_FRAME:
                tail += block
        self.frame += bytes(tail)


@dataclass(frozen=True, slots=True)
class _Part(Generic[T]):
    """The decoded events of a buffer."""

    lists: list[T]
    cut: int
    """Position in the buffer after the events; 0 if there are none."""
    list_end: int | None = None
    """Position of the bracket that closes the list; None if it is not in the buffer."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """Positions in a buffer of events."""

    events_end: int
    """After the last complete event; 0 if there is none."""
    list_end: int | None
    """The bracket that closes the list; None if it is not in the buffer."""


def _read_more(blocks: Iterator[bytes], size: int) -> bytes:
    """The next block, or blocks of at least ``size`` bytes.

    A buffer without a complete event doubles, so it is searched in linear time.
    """
    parts: list[bytes] = []
    while not parts or sum(map(len, parts)) < size:
        block = next(blocks, None)
        if block is None:
            break
        if block:
            parts.append(block)
    return b"".join(parts)


def _framed(text: bytes) -> bytearray:
    """The text with one byte before it for ``[`` and one after it for ``]``."""
    return bytearray().join((b"[", text, b" "))


def _scan(buffer: bytearray) -> _Scan:
    """Find the end of the last complete event by following all strings and brackets.

    Exact for any format of the events, but ten times slower than :meth:`TraceFile._guess_cut`.
    """
    depth, end = 0, 0
    for token in STRING_OR_BRACKET.finditer(buffer, 1):
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
    for token in STRING_OR_BRACKET.finditer(buffer, start):
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
    except INVALID:
        return None
    finally:
        buffer[cut] = saved
