"""Replacements in a text that keep the offsets of the original."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Edit:
    """The replacement of one range of the original text; an empty range is an insertion."""

    start: int
    end: int
    replacement: str


class EditedText:
    """A text with edits, read by offsets of the original."""

    def __init__(self, text: str, edits: Iterable[Edit]) -> None:
        self._text = text
        self._edits = sorted(edits)
        self._starts = [edit.start for edit in self._edits]

    def piece(self, start: int, end: int) -> str:
        """The range of the original, with the edits that begin in it."""
        pieces: list[str] = []
        at = start
        for number in range(bisect_left(self._starts, start), len(self._edits)):
            edit = self._edits[number]
            if edit.start >= end:
                break
            pieces += (self._text[at : edit.start], edit.replacement)
            at = edit.end
        pieces.append(self._text[at:end])
        return "".join(pieces)
