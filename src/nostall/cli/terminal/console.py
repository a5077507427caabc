"""Terminal output of all commands: output formats, tables, JSON documents and error lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nostall.cli.terminal.table_layout import align_numbers, column_widths, fitting, list_rows
from nostall.core.text.terminal import escape_controls

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
        """As :meth:`rich.console.Console.print`, for plain text."""
        super().print(*(_plain(item) for item in objects), **options)


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
