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

from nostall.core.text import escape_controls


class Format(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]


class PlainConsole(Console):
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


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table.  Titles and cells are plain text: Rich markup in them is not interpreted."""
    from rich.text import Text

    table = Table(title=Text(_plain(title)), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(str(cell))) for cell in row))
    Console(highlight=False).print(table)


def print_error(message: str) -> None:
    """Print an error message on one line of standard error."""
    err.print(f"nostall: {message}")
