"""Reader for job tables: CSV or Parquet, one job per row, streamed in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from nostall.core.errors import BadJob
from nostall.core.plurals import pluralize
from nostall.workload.jobs.columns import Column, parse_header
from nostall.workload.jobs.csv_rows import CsvRows
from nostall.workload.jobs.parquet_rows import read_parquet
from nostall.workload.jobs.precisions import canonical_precision
from nostall.workload.jobs.record import Architecture, Job

SUFFIXES = (".csv", ".csv.gz", ".parquet")
Cells = dict[str, Any] | str
"""The cells of a row by field name, or the reason why the row cannot be read."""
MAX_REASONS = 100
"""Skipped rows whose reason is stored; further ones are only counted."""
_MAX_SHOWN = 60
"""Characters of a value in a reason."""


def _normalise_architecture(value: object) -> object:
    """Accept 'PS/Worker', 'ps_worker' and 'PS-Worker' for 'ps-worker'."""
    if not isinstance(value, str):
        return value
    return value.strip().lower().replace("/", "-").replace("_", "-").replace(" ", "-")


def _printable(name: str) -> str:
    """The name without control characters, which can change the state of a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in name)


class JobRow(BaseModel):
    """Schema of a table row; the fields are those of :class:`Job`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: Annotated[str, AfterValidator(_printable)] | None = None
    architecture: Annotated[Architecture, BeforeValidator(_normalise_architecture)]
    replicas: int = 1
    batch: float = 1.0
    flops: float = 0.0
    memory_bytes: float = 0.0
    input_bytes: float = 0.0
    dense_bytes: float = 0.0
    embedding_bytes: float = 0.0
    touched_bytes: float = 0.0
    weight_traffic: float | None = None
    precision: Annotated[str, AfterValidator(canonical_precision)] = "fp32"
    gpu_hours: float | None = None


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that does not describe a job."""

    position: str
    """Line of a CSV file (``line 4``) or row of a Parquet file (``row 4``)."""
    reason: str


@dataclass(frozen=True, slots=True)
class JobTable:
    """The jobs of a table file, and the rows that were skipped."""

    path: Path
    jobs: tuple[Job, ...]
    skipped_rows: tuple[SkippedRow, ...]
    """The first :data:`MAX_REASONS` skipped rows."""
    num_skipped: int
    """Number of all skipped rows."""
    notes: tuple[str, ...] = ()
    """Damage in rows that are used."""


def is_table(path: Path) -> bool:
    """Whether the suffix of the file name is that of a job table."""
    return path.name.lower().endswith(SUFFIXES)


def read_jobs(path: Path) -> JobTable:
    """Read a job table; its columns are fields of :class:`Job` with an optional unit in brackets.

    For example, ``dense_bytes [MB]`` or ``flops [T]``.  A row that does not describe a job is
    skipped and reported in the result.  Raises :class:`~nostall.core.errors.BadJob` if no row
    describes a job.
    """
    is_parquet = path.name.lower().endswith(".parquet")
    jobs: list[Job] = []
    skipped_rows: list[SkippedRow] = []
    num_skipped = num_replaced = 0
    for position, cells in _parquet_cells(path) if is_parquet else _csv_cells(path):
        try:
            jobs.append(_parse_job(cells, f"job {len(jobs) + num_skipped + 1}"))
        except (ValidationError, BadJob) as error:
            num_skipped += 1
            if len(skipped_rows) < MAX_REASONS:
                skipped_rows.append(SkippedRow(position, _reason(error)))
        else:
            num_replaced += _has_replaced_text(cells)
    if not jobs:
        first = "the table has no rows"
        if skipped_rows:
            first = f"first reason: {skipped_rows[0].position}: {skipped_rows[0].reason}"
        raise BadJob(
            f"{path}: no job in {pluralize(num_skipped, 'row')}; {first}; correct the rows"
        )
    notes = []
    if num_replaced:
        rows = pluralize(num_replaced, "row")
        notes.append(f"{rows} with bytes that are not UTF-8; the text of these cells is damaged")
    return JobTable(path, tuple(jobs), tuple(skipped_rows), num_skipped, tuple(notes))


def _parse_job(cells: Cells, default_name: str) -> Job:
    if isinstance(cells, str):
        raise BadJob(cells)
    row = JobRow.model_validate({k: v for k, v in cells.items() if v not in (None, "")})
    return Job(**{**row.model_dump(), "name": row.name or default_name})


def _has_replaced_text(cells: Cells) -> bool:
    """Whether a cell has bytes that were not UTF-8."""
    values = cells.values() if isinstance(cells, dict) else ()
    return any(isinstance(value, str) and "\ufffd" in value for value in values)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f", got {_shown(first['input'])}"
        return f"{field}: {first['msg'].lower()}{value}"
    return str(error)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


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


def _csv_cells(path: Path) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a CSV file, plain or gzipped."""
    file = CsvRows(path)
    rows = iter(file)
    _, header = next(rows, (1, []))
    columns = parse_header(header or (), JobRow.model_fields, str(path))
    line = 1
    for line, cells in rows:
        yield f"line {line}", _csv_row(header or (), cells, columns)
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


def _parquet_cells(path: Path) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a Parquet file."""
    names, rows = read_parquet(path)
    columns = parse_header(names, JobRow.model_fields, str(path))
    for number, row in rows:
        yield f"row {number}", row if isinstance(row, str) else _convert_units(row, columns)
