"""Reader for job tables: CSV or Parquet, one job per row, streamed in bounded memory."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from nostall.core.errors import BadJob, MissingPart
from nostall.workload.jobs.columns import Column, parse_header
from nostall.workload.jobs.record import Architecture, Job

SUFFIXES = (".csv", ".csv.gz", ".parquet")
Cells = dict[str, Any] | str
"""The cells of a row by field name, or the reason why the row cannot be read."""
MAX_REASONS = 100
"""Skipped rows whose reason is stored; further ones are only counted."""


def _normalise_architecture(value: object) -> object:
    """Accept 'PS/Worker', 'ps_worker' and 'PS-Worker' for 'ps-worker'."""
    if not isinstance(value, str):
        return value
    return value.strip().lower().replace("/", "-").replace("_", "-").replace(" ", "-")


class JobRow(BaseModel):
    """Schema of a table row; the fields are those of :class:`Job`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: str | None = None
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
    precision: str = "fp32"
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


def is_table(path: Path) -> bool:
    """Whether the suffix of the file name is that of a job table."""
    return path.name.lower().endswith(SUFFIXES)


def read_jobs(path: Path) -> JobTable:
    """Read a job table; its columns are fields of :class:`Job` with an optional unit in brackets.

    For example, ``dense_bytes [MB]`` or ``flops [T]``.  A row that does not describe a job is
    skipped and reported in the result.  Raises :class:`~nostall.core.errors.BadJob` if no row
    describes a job.
    """
    rows = _parquet_rows(path) if path.name.lower().endswith(".parquet") else _csv_rows(path)
    jobs: list[Job] = []
    skipped_rows: list[SkippedRow] = []
    num_skipped = 0
    for position, cells in rows:
        try:
            jobs.append(_parse_job(cells, f"job {len(jobs) + num_skipped + 1}"))
        except (ValidationError, BadJob) as error:
            num_skipped += 1
            if len(skipped_rows) < MAX_REASONS:
                skipped_rows.append(SkippedRow(position, _reason(error)))
    if not jobs:
        first = (
            f"; first reason: {skipped_rows[0].position}: {skipped_rows[0].reason}"
            if skipped_rows
            else ""
        )
        raise BadJob(f"{path}: none of {num_skipped} rows describes a job{first}")
    return JobTable(path, tuple(jobs), tuple(skipped_rows), num_skipped)


def _parse_job(cells: Cells, default_name: str) -> Job:
    if isinstance(cells, str):
        raise BadJob(cells)
    row = JobRow.model_validate({k: v for k, v in cells.items() if v not in (None, "")})
    return Job(**{**row.model_dump(), "name": row.name or default_name})


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f", got {first['input']!r}"
        return f"{field}: {first['msg'].lower()}{value}"
    return str(error)


def _convert_units(row: Mapping[str, Any], columns: Mapping[str, Column]) -> Cells:
    """Cells by field name in base units, or the reason if a cell is not a number."""
    cells = {}
    for header, value in row.items():
        column = columns[header]
        if column.factor != 1.0 and value not in (None, ""):
            try:
                value = float(value) * column.factor
            except (TypeError, ValueError):
                return f"{column.field}: should be a number, got {value!r}"
        cells[column.field] = value
    return cells


def _csv_rows(path: Path) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a CSV file, plain or gzipped."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    line = 0
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            assert isinstance(file, io.TextIOBase)
            reader = csv.DictReader(file)
            columns = parse_header(reader.fieldnames or (), JobRow.model_fields, str(path))
            for row in reader:
                line = reader.line_num
                yield f"line {line}", _parse_csv_row(row, columns)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        # The rows before the damage are valid: they are used, and the damage is one skipped row.
        yield f"after line {line}", f"the rest of the file is not readable: {error}"


def _parse_csv_row(row: Mapping[str | None, Any], columns: Mapping[str, Column]) -> Cells:
    # DictReader stores surplus cells under None, and None for missing cells.
    if None in row or None in row.values():
        return f"the row does not have the {len(columns)} cells of the header"
    return _convert_units({str(key): value for key, value in row.items()}, columns)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a Parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingPart(
            f"{path} is a Parquet file and pyarrow is not installed; pip install "
            "'nostall[parquet]', or convert the table to CSV"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = parse_header(file.schema_arrow.names, JobRow.model_fields, str(path))
            number = 0
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _convert_units(row, columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadJob(f"{path}: not a readable Parquet file: {error}; repair the file") from error
