"""Terminal output of all commands: output formats, tables, JSON documents and error lines."""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import zip_longest
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from nostall.core.text.terminal import escape_controls

MAX_WORD = 40
"""Cells of a word that a column keeps whole; longer ones, such as paths, are folded."""
_SHORT = 20
"""Cells of a text that is better not divided."""
_GAP = 2
"""Cells between two columns."""
_EMPTY = ("", "-", "–")
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(?:\.(\d+))?")
_QUANTITY = re.compile(rf"(?:{_NUMBER.pattern})(?:e[-+]?\d+)?\s?(?:x|%|[a-zµ]?s|[kMGT]?i?B|MHz|W)?")

Rows = Sequence[Sequence[str]]


def align_numbers(rows: Rows) -> tuple[list[list[str]], list[bool]]:
    """The rows with equal decimals in each column of plain numbers; which columns hold numbers.

    A column holds numbers if each of its cells is one, with or without a unit, or is empty. Zeros
    are added to numbers without a unit, so that their points are below each other.
    """
    columns = [list(column) for column in zip_longest(*rows, fillvalue="")]
    are_numbers = []
    for column in columns:
        filled = [cell for cell in column if cell not in _EMPTY]
        are_numbers.append(bool(filled) and all(map(_QUANTITY.fullmatch, filled)))
        plain = [_NUMBER.fullmatch(cell) for cell in filled]
        if filled and all(plain):
            most = max(len(match[1] or "") for match in plain if match)
            column[:] = [cell if cell in _EMPTY else _decimals(cell, most) for cell in column]
    return [list(row) for row in zip(*columns, strict=True)], are_numbers


def _decimals(text: str, number: int) -> str:
    """A number with zeros added up to ``number`` decimals."""
    whole, _, decimals = text.partition(".")
    return f"{whole}.{decimals:0<{number}}" if number else text


def column_widths(columns: Sequence[str], rows: Rows, width: int) -> list[int] | None:
    """Width of each column in a terminal of ``width`` cells.

    A column gets at least its longest word and at most its longest line; columns in between get
    equal widths.  Short cells stay on one line, if there is room.  Returns None if the words do not
    fit side by side; the rows are then to be listed.
    """
    texts = [[header, *cells] for header, *cells in zip_longest(columns, *rows, fillvalue="")]
    natural = [max(map(_line_width, column)) for column in texts]
    words = [min(MAX_WORD, max(map(_word_width, column))) for column in texts]
    available = width - _GAP * (len(columns) - 1)
    if sum(words) > available:
        return None
    short = [
        max([word, *(n for n in map(_line_width, column[1:]) if n <= _SHORT)])
        for word, column in zip(words, texts, strict=True)
    ]
    least = short if sum(short) <= available else words
    pairs = list(zip(least, natural, strict=True))
    level = bisect_right(range(width), available, key=lambda limit: sum(_widths_at(limit, pairs)))
    widths = _widths_at(level - 1, pairs)
    for column, (_, most) in enumerate(pairs):  # what one more cell for all would exceed
        if widths[column] < most and sum(widths) < available:
            widths[column] += 1
    return widths


def fitting(
    columns: Sequence[str],
    rows: Rows,
    are_numbers: Sequence[bool],
    width: int,
    optional: Sequence[str],
) -> tuple[list[str], list[list[str]], list[bool]]:
    """The table without as many of the columns ``optional`` as it needs to fit.

    Names that are left out come first. A table fits if no line of :data:`MAX_WORD` cells or less
    is divided; if no choice fits, its words have to. If nothing helps, all columns stay.
    """
    left_out: set[str] = set()
    choices = []
    for name in (None, *optional):
        left_out |= {name} if name is not None else set()
        places = [at for at, column in enumerate(columns) if column not in left_out]
        choices.append((
            [columns[at] for at in places],
            [[row[at] for at in places if at < len(row)] for row in rows],
            [are_numbers[at] for at in places if at < len(are_numbers)],
        ))  # fmt: skip
    whole = [choice for choice in choices if _line_widths(*choice[:2]) <= width]
    by_words = [c for c in reversed(choices) if column_widths(c[0], c[1], width) is not None]
    return next(iter(whole or by_words or choices))


def _line_widths(columns: Sequence[str], rows: Rows) -> int:
    """Cells of a table whose lines of up to :data:`MAX_WORD` cells are not divided."""
    texts = [[header, *cells] for header, *cells in zip_longest(columns, *rows, fillvalue="")]
    natural = [min(MAX_WORD, max(map(_line_width, column))) for column in texts]
    return sum(natural) + _GAP * (len(columns) - 1)


def _widths_at(level: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Widths with ``level`` as the limit, but for longer words and shorter lines."""
    return [max(word, min(line, level)) for word, line in pairs]


def list_rows(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    """The rows as lines: the first cell, then a line for each other one that is not empty."""
    names = [" ".join(column.split()) for column in columns]
    indent = max(map(cell_len, names[1:]), default=0)
    for row in rows:
        yield row[0]
        for name, cell in zip(names[1:], row[1:], strict=False):
            if cell.strip():
                yield f"  {name:<{indent}}  {' '.join(cell.split())}"


def _line_width(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _word_width(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


MAX_ERROR = 1000
"""Characters of an error message that are printed."""


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


class OutputConsole(Console):
    """A console whose output must be written: an ended reader is an error, as a full disk is."""

    def on_broken_pipe(self) -> None:
        """Raise the error that is being handled; Rich would exit with 1, the answer *no*."""
        raise


class PlainConsole(OutputConsole):
    """A console that prints text as it is, without markup; control characters become escapes.

    Names in cubins, traces and bundles may hold escape sequences that a terminal would obey.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """As :meth:`rich.console.Console.print`, for plain text.

        A terminal gets long sentences in lines that end between words.  Files and pipes get each
        sentence as one line.
        """
        width = self.width if self.is_terminal else 0
        super().print(*(_wrapped(_plain(item), width) for item in objects), **options)


_WHOLE = re.compile(r"\s|(?:[\w ]+: +)?(?:nostall|python|torchrun) ")
"""Begin of lines that stay whole: rows, source text, and commands, which are to be copied."""
_LABEL = re.compile(r"[\w ]+: {2,}")
"""A label before a sentence, whose further lines begin below its first word."""


def _wrapped(item: Any, width: int) -> Any:
    """A text whose sentences have at most ``width`` cells a line; 0: any number."""
    if not isinstance(item, str) or width <= 0:
        return item
    lines = []
    for line in item.split("\n"):
        if cell_len(line) <= width or _WHOLE.match(line):
            lines.append(line)
            continue
        label = _LABEL.match(line)
        lines += wrap(
            line, width, subsequent_indent=" " * (label.end() if label else 0),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines)


def _plain(item: Any) -> Any:
    return escape_controls(item, keep="\n\t") if isinstance(item, str) else item


out = PlainConsole()
"""Standard output."""
err = PlainConsole(stderr=True)
"""Standard error."""


def show_json(value: Any) -> None:
    """Print a JSON document."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    optional: Sequence[str] = (),
) -> None:
    """Print a table, or a list if its words do not fit side by side.

    The columns ``optional`` are left out one after the other where that makes the table fit.
    Columns of numbers are aligned at the right and have the same number of decimals. Titles and
    cells are plain text: Rich markup in them is not interpreted.
    """
    from rich import box
    from rich.text import Text

    console = OutputConsole(highlight=False)
    cells, are_numbers = align_numbers([[_plain(str(cell)) for cell in row] for row in rows])
    columns, cells, are_numbers = fitting(columns, cells, are_numbers, console.width, optional)
    widths = column_widths(columns, cells, console.width)
    out.print(Text(_plain(title), style="bold"))
    if widths is None and len(columns) > 2:
        for line in list_rows(columns, cells):
            out.print(line)
        return
    table = Table(
        box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for number, column in enumerate(columns):
        width = widths[number] if widths is not None else None
        is_number = number < len(are_numbers) and are_numbers[number]
        table.add_column(
            column, overflow="fold", width=width, justify="right" if is_number else "left"
        )
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def print_error(message: str) -> None:
    """Print an error message on one line of standard error.

    The middle of a long one is left out: it begins with what is wrong and ends with what to do.
    """
    if len(message) > MAX_ERROR:
        half = MAX_ERROR // 2
        left_out = len(message) - 2 * half
        message = f"{message[:half]} ... ({left_out} characters) ... {message[-half:]}"
    err.print(f"nostall: {message}")
