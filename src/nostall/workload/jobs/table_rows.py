"""Rows of a table file, CSV or Parquet, as cells by field name in base units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from nostall.core.errors import BadJob
from nostall.core.text.plurals import pluralize
from nostall.workload.jobs.columns import Column, field_names, parse_header
from nostall.workload.jobs.csv_rows import CsvRows
from nostall.workload.jobs.parquet_rows import read_parquet

SUFFIXES = (".csv", ".csv.gz", ".parquet")
MAX_REASONS = 100
"""Skipped rows whose reason is stored; further ones are only counted."""
_MAX_SHOWN = 60
"""Characters of a value in a reason."""

Cells = dict[str, Any] | str
"""The cells of a row by field name, or the reason why the row cannot be read."""
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that cannot be used."""

    position: str
    """Line of a CSV file (``line 4``) or row of a Parquet file (``row 4``)."""
    reason: str


class TableReader(Generic[M]):
    """Reads the rows of a table file as a pydantic model; rows that do not fit it are skipped."""

    def __init__(self, path: Path, model: type[M], required: Sequence[str]) -> None:
        self.path, self.model, self.required = path, model, required
        self.skipped_rows: list[SkippedRow] = []
        """The first :data:`MAX_REASONS` skipped rows."""
        self.num_rows = self.num_skipped = self._num_replaced = 0

    def rows(self) -> Iterator[tuple[str, M]]:
        """(position, row) of each row that fits the model.

        Raises :class:`~nostall.core.errors.BadJob` if the file or its header cannot be read.
        """
        for position, cells in _table_cells(self.path, self.model.model_fields, self.required):
            self.num_rows += 1
            if isinstance(cells, str):
                self.skip(position, cells)
                continue
            given = {name: value for name, value in cells.items() if value not in (None, "")}
            try:
                row = self.model.model_validate(given)
            except ValidationError as error:
                self.skip(position, _validation_reason(error))
                continue
            self._num_replaced += _has_replaced_text(cells)
            yield position, row

    def skip(self, position: str, reason: str) -> None:
        """Count a row as skipped."""
        self.num_skipped += 1
        if len(self.skipped_rows) < MAX_REASONS:
            self.skipped_rows.append(SkippedRow(position, reason))

    @property
    def notes(self) -> tuple[str, ...]:
        """Damage in rows that are used."""
        if not self._num_replaced:
            return ()
        rows = pluralize(self._num_replaced, "row")
        return (f"{rows} with bytes that are not UTF-8; the text of these cells is damaged",)

    def nothing_read(self, what: str) -> BadJob:
        """The error for a table in which no row is a ``what``."""
        first = "the table has no rows"
        if self.skipped_rows:
            first = f"first reason: {self.skipped_rows[0].position}: {self.skipped_rows[0].reason}"
        return BadJob(
            f"{self.path}: no {what} in {pluralize(self.num_skipped, 'row')}; {first}; correct the "
            "rows"
        )


def is_table(path: Path) -> bool:
    """Whether the suffix of the file name is that of a table."""
    return path.name.lower().endswith(SUFFIXES)


def table_fields(path: Path) -> set[str]:
    """The fields that the header of a table names; empty if it cannot be read."""
    try:
        if path.name.lower().endswith(".parquet"):
            return field_names(read_parquet(path)[0])
        _, header = next(iter(CsvRows(path)), (1, None))
        return field_names(header or ())
    except BadJob:
        return set()


def _table_cells(
    path: Path, fields: Mapping[str, object], required: Sequence[str]
) -> Iterator[tuple[str, Cells]]:
    if path.name.lower().endswith(".parquet"):
        return _parquet_cells(path, fields, required)
    return _csv_cells(path, fields, required)


def _csv_cells(
    path: Path, fields: Mapping[str, object], required: Sequence[str]
) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a CSV file, plain or gzipped."""
    file = CsvRows(path)
    rows = iter(file)
    _, header = next(rows, (1, None))
    header = header or []
    columns = parse_header(header, list(fields), str(path), required)
    line = 1
    for line, cells in rows:
        yield f"line {line}", _csv_row(header, cells, columns)
    if file.end_damage:
        yield f"after line {line}", f"the rest of the file is not readable: {file.end_damage}"


def _csv_row(
    header: Sequence[str], cells: Sequence[str] | None, columns: Mapping[str, Column]
) -> Cells:
    if cells is None:
        return "the row is not valid CSV (a quote that is not closed, or a line that is too long)"
    if len(cells) != len(header):
        return f"the row has {len(cells)} cells, the header has {len(header)}"
    return _convert_units(dict(zip(header, cells, strict=True)), columns)


def _parquet_cells(
    path: Path, fields: Mapping[str, object], required: Sequence[str]
) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a Parquet file."""
    names, rows = read_parquet(path)
    columns = parse_header(names, list(fields), str(path), required)
    for number, row in rows:
        yield f"row {number}", row if isinstance(row, str) else _convert_units(row, columns)


def _convert_units(row: Mapping[str, Any], columns: Mapping[str, Column]) -> Cells:
    """Cells by field name in base units, or the reason if a cell is not a number."""
    cells = {}
    for header, value in row.items():
        column = columns[header]
        if column.factor != 1.0 and value not in (None, ""):
            try:
                value = float(value) * column.factor
            except (TypeError, ValueError, OverflowError):
                return f"{column.field}: should be a number, got {_shown(value)}"
        cells[column.field] = value
    return cells


def _has_replaced_text(cells: Mapping[str, Any]) -> bool:
    """Whether a cell has bytes that were not UTF-8."""
    return any(isinstance(value, str) and "\ufffd" in value for value in cells.values())


def _validation_reason(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    value = "" if first["type"] == "missing" else f", got {_shown(first['input'])}"
    return f"{field}: {first['msg'].lower()}{value}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def printable(name: str) -> str:
    """The name without control characters, which can change the state of a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in name)
