"""Layout of tables in a terminal of any width: words stay whole, and wide tables become lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.cells import cell_len

MAX_WORD = 40
"""Cells of a word that a column keeps whole; longer ones, such as paths, are folded."""
_BORDER = 3
"""Cells that a column takes beside its text."""

Rows = Sequence[Sequence[str]]


def column_widths(columns: Sequence[str], rows: Rows, width: int) -> list[int] | None:
    """Width of each column in a terminal of ``width`` cells.

    A column gets at least its longest word, and what is left goes to the columns that need it.
    Returns None if the words do not fit side by side; the rows are then to be listed.
    """
    texts = [[header, *cells] for header, *cells in zip_longest(columns, *rows, fillvalue="")]
    natural = [max(map(_line_width, column)) for column in texts]
    words = [min(MAX_WORD, max(map(_word_width, column))) for column in texts]
    free = width - 1 - _BORDER * len(columns) - sum(words)
    if free < 0:
        return None
    widths = list(words)
    # The narrowest needs first, so that as many columns as possible stay on one line.
    for column in sorted(range(len(columns)), key=lambda i: natural[i] - words[i]):
        given = min(free, natural[column] - words[column])
        widths[column] += given
        free -= given
    return widths


def list_rows(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """The rows as lines: the first cell, then a line for each other one."""
    names = [" ".join(column.split()) for column in columns]
    indent = max(map(cell_len, names[1:]), default=0)
    for row in rows:
        yield row[0]
        for name, cell in zip(names[1:], row[1:], strict=False):
            yield f"  {name:<{indent}}  {' '.join(cell.split())}"


def _line_width(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _word_width(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)
