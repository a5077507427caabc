"""Event lists of trace files as a stream: text blocks, cuts between events, damaged text.

Streaming reader for the events of a trace file, in bounded memory.

A trace is one JSON object whose ``traceEvents`` list can be gigabytes long.  This module cuts the
text of the list between events, and msgspec decodes each piece.  A cut inside a string or a nested
object gives invalid JSON, so msgspec detects every wrong cut.  Text that is not valid at any cut is
damaged; :mod:`~nostall.workload.traces.stream` recovers the events in it.

Recovery of events from damaged text: repair of characters, restart at the next event.

The text of the list of events is split at the borders between events.  Ranges that are valid are
decoded as a whole and the others are halved, so one damaged event costs one event, and the time is
linear in the size of the text.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import CHUNK, Progress, TextBlocks
from nostall.core.text.plurals import pluralize

T = TypeVar("T")
Decode = Callable[[bytes | memoryview], T]

INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for text that is not JSON."""
EVENT_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "args", "bp", "s")
"""Fields of the Trace Event Format; the first key of an event is one of them."""
STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A bracket, or a string whose brackets must not be counted; it can be cut off by the end."""

_SEPARATORS = b" \t\r\n,"
_MAX_RESTARTS = 8
"""Restarts inside the text of one damaged event."""
_MAX_NESTED = 1 << 16
"""Bytes behind a border that are searched for the end of an event that contains such text."""
_LIST_END = re.compile(rb'[\s,]*\](?=\s*(?:,\s*"|\}))')
_BRACKET = re.compile(rb"[\s,]*\]")
_LIST_END_AT_END = re.compile(rb'[\s,]*\](?=\s*(?:,\s*"|\}|\Z))')

_CONTROL = bytes(range(32))
_CONTROL_TO_SPACE = bytes.maketrans(_CONTROL, b" " * len(_CONTROL))
_INVALID_CONTROL = bytes.maketrans(
    bytes(set(_CONTROL) - set(b"\t\n\r")), b" " * (len(_CONTROL) - 3)
)
_ESCAPE = re.compile(
    rb'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(?P<surrogate>\\u[0-9a-fA-F]{4})|(?P<lone>\\)"
)
_NOT_FINITE = re.compile(rb"([:,\[]\s*)([-+]?(?:[iI][nN][fF](?:inity)?|[nN][aA][nN]))(?=\s*[,\]}])")


def _question_marks(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte that is not UTF-8, which keeps the length of the text."""
    assert isinstance(error, UnicodeDecodeError)
    return "?" * (error.end - error.start), error.end


codecs.register_error("nostall.question_marks", _question_marks)


def repair(text: bytes) -> tuple[bytes, list[int]]:
    """Text of the same length with valid UTF-8, escapes and numbers, and the replaced positions.

    Control characters become spaces; tabs and line ends are not reported, because they are valid
    between events.  A lone backslash becomes a slash.  Infinity and NaN become empty strings, which
    are missing numbers.  Neighbouring replaced bytes count as one position.
    """
    original = text
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="nostall.question_marks").encode()
    invalid = np.frombuffer(text.translate(_INVALID_CONTROL), "u1") != np.frombuffer(original, "u1")
    text = text.translate(_CONTROL_TO_SPACE)
    edits = [m.span(2) for m in _NOT_FINITE.finditer(text)]
    if b"\\" in text:
        edits += [m.span(m.lastgroup) for m in _ESCAPE.finditer(text) if m.lastgroup]
    if edits:
        repaired = bytearray(text)
        for begin, end in edits:
            size = end - begin
            repaired[begin:end] = {1: b"/", 6: rb"\ufffd"}.get(size, b'""'.ljust(size))
            invalid[begin] = True
        text = bytes(repaired)
    is_first = invalid.copy()
    is_first[1:] &= ~invalid[:-1]
    return text, np.flatnonzero(is_first).tolist()


def ends_list(text: bytes | bytearray, position: int, at_end: bool) -> re.Match[bytes] | None:
    """The bracket at ``position`` if it closes the list of events.

    After it, the object goes on or ends.  ``at_end`` says that the file ends with the text.
    """
    return (_LIST_END_AT_END if at_end else _LIST_END).match(text, position)


@dataclass(frozen=True, slots=True)
class EventBorders:
    """Patterns of the text between two events, and of the start of an event."""

    between: re.Pattern[bytes]
    start: re.Pattern[bytes]

    @classmethod
    def before(cls, first_key: str = "ph") -> EventBorders:
        """Borders before events whose first key is a field of the format or ``first_key``."""
        keys = "|".join(map(re.escape, dict.fromkeys((*EVENT_KEYS, first_key))))
        start = rf'\{{\s*"(?:{keys})"\s*:'.encode()
        return cls(re.compile(rb"\}\s*,\s*(?=%b)" % start), re.compile(start))


@dataclass(slots=True)
class Salvage(Generic[T]):
    """Events that were recovered from a text, and what was lost."""

    lists: list[T] = field(default_factory=list)
    """Decoded events, in lists."""
    consumed: int = 0
    """Bytes of the text that are finished; the rest may be an event that is not complete yet."""
    list_end: int | None = None
    """Position of the bracket that closes the list; None: it is not in the text."""
    lost: int = 0
    """Events that cannot be recovered."""
    first_damage: int | None = None
    """Position of the first damage that is not a character."""
    repaired: int = 0
    """Characters, numbers and borders that are not JSON and were replaced or skipped."""


def salvage(
    text: bytes, decode: Decode[T], borders: EventBorders, *, at_end: bool = False
) -> Salvage[T]:
    """Recover the events of a text that starts between two events.

    ``decode`` gets the text of a JSON list.  ``at_end`` says that the file ends with the text;
    otherwise the text after the last border is not consumed, because it may go on.
    """
    recovery = _Recovery(text, decode, borders, at_end)
    recovery.run()
    return recovery.result


class _Recovery(Generic[T]):
    """State of :func:`salvage`."""

    def __init__(self, text: bytes, decode: Decode[T], borders: EventBorders, at_end: bool) -> None:
        self.text, self.replaced = repair(text)
        self.decode, self.borders, self.at_end = decode, borders, at_end
        self.result: Salvage[T] = Salvage()
        self.nested_budget = len(text)
        """Bytes that may be searched behind borders; it keeps the time linear."""

    def run(self) -> None:
        starts = [0, *(match.end() for match in self.borders.between.finditer(self.text))]
        if len(starts) > 1 and not self._decode(0, starts[-1]):
            self._halve(starts, 0, len(starts) - 1)
        if self.result.list_end is None:
            self._finish(max(starts[-1], self.result.consumed))
        self.result.repaired += bisect_left(self.replaced, self.result.consumed)

    def _halve(self, starts: list[int], low: int, high: int) -> None:
        """Recover the events between ``starts[low]`` and ``starts[high]``."""
        begin, end = max(starts[low], self.result.consumed), starts[high]
        if begin >= end or self.result.list_end is not None:
            return
        if self._decode(begin, end):
            self.result.consumed = end
        elif high - low == 1:
            self._walk(begin, end)
        else:
            middle = (low + high) // 2
            self._halve(starts, low, middle)
            self._halve(starts, middle, high)

    def _decode(self, begin: int, end: int) -> bool:
        """Decode the events between two positions; False if they are not valid."""
        try:
            self.result.lists.append(self.decode(b"[%b]" % self.text[begin:end].strip(_SEPARATORS)))
        except INVALID:
            return False
        return True

    def _decode_event(self, begin: int, end: int) -> bool:
        """Decode one event; an object without a phase is a part of a damaged one."""
        return b'"ph"' in self.text[begin:end] and self._decode(begin, end)

    def _walk(self, begin: int, stop: int) -> bool:
        """Recover events from a text that is not valid, one after the other.

        Returns whether the last event has no end.
        """
        position, failures, is_cut = begin, 0, False
        skipped: list[bytes] = []
        while failures < _MAX_RESTARTS:
            start = self.borders.start.search(self.text, position, stop)
            if start is None:
                break
            skipped.append(self.text[position : start.start()])
            end = self._event_end(start.start(), stop)
            is_cut = end is None
            is_valid = end is not None and self._decode_event(start.start(), end)
            list_end = self._list_end(end) if end else None
            if end is None or not (is_valid or list_end):
                failures += 1
                position = start.start() + 1
                continue
            failures += not is_valid
            position = end
            if list_end:
                self.result.list_end = position = stop = list_end.end() - 1
                break
        skipped.append(self.text[position:stop])
        junk = b"".join(part.strip(_SEPARATORS) for part in skipped)
        if failures or junk:
            self._note_damage(begin)
        if failures or b'"ph"' in junk:
            self.result.lost += 1
        elif junk:
            self.result.repaired += 1
        self.result.consumed = max(stop, position)
        return is_cut

    def _list_end(self, position: int) -> re.Match[bytes] | None:
        """The end of the list at ``position``, unless events follow it."""
        match = ends_list(self.text, position, self.at_end)
        return None if match and self.borders.between.search(self.text, position) else match

    def _note_damage(self, position: int) -> None:
        if self.result.first_damage is None:
            self.result.first_damage = position

    def _event_end(self, start: int, stop: int) -> int | None:
        """Position after the event at ``start``, also if it contains the border at ``stop``."""
        if end := self._closing_bracket(start, stop):
            return end
        limit = min(len(self.text), stop + min(_MAX_NESTED, self.nested_budget))
        self.nested_budget -= limit - stop
        return self._closing_bracket(start, limit) if limit > stop else None

    def _closing_bracket(self, start: int, stop: int) -> int | None:
        depth = 0
        for token in STRING_OR_BRACKET.finditer(self.text, start, stop):
            first = self.text[token.start()]
            depth += (first in b"{[") - (first in b"}]")
            if depth == 0 and first in b"}]":
                return token.end()
        return None

    def _finish(self, begin: int) -> None:
        """Recover the text after the last border: an event, and perhaps the end of the list."""
        result, text = self.result, self.text
        result.consumed = begin
        if match := ends_list(text, begin, self.at_end) or self._last_bracket(begin):
            result.list_end = result.consumed = match.end() - 1
            return
        if self.at_end:
            counts = result.lost, result.first_damage, result.repaired
            is_cut = self._walk(begin, len(text)) or text[begin:].strip(_SEPARATORS) == b"{"
            if result.list_end is None and (is_cut or not text[begin:].strip(_SEPARATORS)):
                # The end of the file cuts the last event off, which the caller reports.
                result.lost, result.first_damage, result.repaired = counts
            return
        start = self.borders.start.match(text, begin)
        end = self._closing_bracket(begin, len(text)) if start else None
        match = ends_list(text, end, self.at_end) if end else None
        if end and match and self._decode(begin, end):
            result.list_end = result.consumed = match.end() - 1

    def _last_bracket(self, begin: int) -> re.Match[bytes] | None:
        """A bracket at ``begin`` that no event follows, but text that is not of the trace."""
        bracket = _BRACKET.match(self.text, begin) if self.at_end else None
        return None if self.borders.start.search(self.text, begin) else bracket


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
