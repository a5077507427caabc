"""Rows of a CSV file, plain or gzipped; a damaged line costs the row that it is in."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from nostall.core.errors import BadJob
from nostall.core.files.text_blocks import TextBlocks

MAX_LINE = 1 << 20
"""Characters of a line; a longer one is no row of a job table."""
_MAX_ROW_LINES = 20
"""Lines of a row whose cells contain line ends."""


@dataclass(slots=True)
class CsvRows:
    """Iterator over (line number, cells) of a CSV file; None for a line that is not CSV."""

    path: Path
    end_damage: str | None = None
    """Cause if the file cannot be read to its end; None: it can."""
    _pushed_back: list[tuple[int, str]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, list[str] | None]]:
        """Yield the rows that are not empty.

        Bytes that are not UTF-8 become U+FFFD.  Raises :class:`~nostall.core.errors.BadJob` if the
        file cannot be opened.
        """
        lines = self._lines()
        while (numbered := self._next(lines)) is not None:
            number, line = numbered
            cells = self._with_line_ends(line, lines) if line.count('"') % 2 else _cells(line)
            if cells is None or any(cells):
                yield number, cells

    def _lines(self) -> Iterator[tuple[int, str]]:
        text = TextBlocks(self.path, error=BadJob)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        number, rest = 0, ""
        for block in text:
            *lines, rest = (rest + decoder.decode(block)).split("\n")
            for line in lines:
                number += 1
                yield number, line
            rest = rest[: MAX_LINE + 1]
        rest += decoder.decode(b"", final=True).rstrip("\n")
        self.end_damage = text.damage
        # A line that the damage cuts off is no row.
        if rest and text.damage is None:
            yield number + 1, rest

    def _next(self, lines: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
        return self._pushed_back.pop() if self._pushed_back else next(lines, None)

    def _with_line_ends(self, line: str, lines: Iterator[tuple[int, str]]) -> list[str] | None:
        """The cells of a row that continues on the next lines; None if no quote closes it."""
        following: list[tuple[int, str]] = []
        while len(following) < _MAX_ROW_LINES and (numbered := self._next(lines)) is not None:
            following.append(numbered)
            if numbered[1].count('"') % 2:
                joined = "\n".join((line, *(text for _, text in following)))
                if (cells := _cells(joined)) is not None:
                    return cells
                break
        self._pushed_back += reversed(following)
        return None


def _cells(line: str) -> list[str] | None:
    if len(line) > MAX_LINE:
        return None
    try:
        rows = list(csv.reader([line.replace("\0", "\ufffd")], strict=True))
    except csv.Error:
        return None
    return rows[0] if rows else []
