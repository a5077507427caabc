"""Recovery of events from damaged text: repair of characters, restart at the next event.

The text of the list of events is split at the borders between events.  Ranges that are valid are
decoded as a whole and the others are halved, so one damaged event costs one event, and the time is
linear in the size of the text.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec
import numpy as np

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
