"""Job tables: CSV or Parquet, one row a job, in bounded memory; bad rows are left out and said."""

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
from nostall.workload.jobs.columns import Column, columns
from nostall.workload.jobs.record import Architecture, Job

SUFFIXES = (".csv", ".csv.gz", ".parquet")
Row = dict[str, Any] | str
"""The cells of a row under their field names, or why the row cannot be read."""
MOST_KEPT = 100
"""Reasons that are kept word by word; further bad rows are only counted."""


def _spelling(value: object) -> object:
    """'PS/Worker', 'ps_worker' and 'PS-Worker' all name the same architecture."""
    if not isinstance(value, str):
        return value
    return value.strip().lower().replace("/", "-").replace("_", "-").replace(" ", "-")


class JobRow(BaseModel):
    """Schema of one row; amounts are for one replica and one step (see :class:`Job`)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: str | None = None
    architecture: Annotated[Architecture, BeforeValidator(_spelling)]
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
class LeftOut:
    """A row that is no job: where it stands and why."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobTable:
    """What a table held: its jobs, and what was left out (``skipped`` counts all of it)."""

    path: Path
    jobs: tuple[Job, ...]
    left_out: tuple[LeftOut, ...]
    skipped: int


def is_table(path: Path) -> bool:
    """Whether the name says that the file is a job table."""
    return path.name.lower().endswith(SUFFIXES)


def read_jobs(path: Path) -> JobTable:
    """Read a table whose columns are the fields of :class:`Job`, some with a unit in brackets.

    ``dense_bytes [MB]`` and ``flops [T]`` scale their column.  A row that cannot be a job is left
    out and reported; a file without a single job raises :class:`~nostall.core.errors.BadJob`.
    """
    rows = _parquet(path) if path.name.lower().endswith(".parquet") else _csv(path)
    jobs: list[Job] = []
    bad: list[LeftOut] = []
    skipped = 0
    for where, row in rows:
        try:
            jobs.append(_job(row, f"job {len(jobs) + skipped + 1}"))
        except (ValidationError, BadJob) as error:
            skipped += 1
            if len(bad) < MOST_KEPT:
                bad.append(LeftOut(where, _why(error)))
    if not jobs:
        first = f"; first reason: {bad[0].where}: {bad[0].reason}" if bad else ""
        raise BadJob(f"{path}: none of {skipped} rows is a job{first}")
    return JobTable(path, tuple(jobs), tuple(bad), skipped)


def _job(row: Row, fallback: str) -> Job:
    if isinstance(row, str):
        raise BadJob(row)
    given = {key: value for key, value in row.items() if value not in (None, "")}
    read = JobRow.model_validate(given)
    fields = read.model_dump()
    return Job(**{**fields, "name": read.name or fallback})


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f", got {first['input']!r}"
        return f"{field}: {first['msg'].lower()}{got}"
    return str(error)


def _scaled(row: Mapping[str, Any], known: Mapping[str, Column]) -> Row:
    """Values under their field names, in base units; or why a value has none."""
    found = {}
    for header, value in row.items():
        column = known[header]
        if column.factor != 1.0 and value not in (None, ""):
            try:
                value = float(value) * column.factor
            except (TypeError, ValueError):
                return f"{column.field}: should be a number, got {value!r}"
        found[column.field] = value
    return found


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    line = 0
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            assert isinstance(file, io.TextIOBase)
            reader = csv.DictReader(file)
            known = columns(reader.fieldnames or (), JobRow.model_fields, str(path))
            for row in reader:
                line = reader.line_num
                yield f"line {line}", _checked(row, known)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        # What came before the damage is good: it is kept, and the damage is reported as a row.
        yield f"after line {line}", f"the rest of the file is not readable: {error}"


def _checked(row: Mapping[str | None, Any], known: Mapping[str, Column]) -> Row:
    """The row under its field names, or why it has none."""
    if None in row or None in row.values():
        return f"more or fewer cells than the {len(known)} of the header"
    return _scaled({str(key): value for key, value in row.items()}, known)


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingPart(
            f"{path} is a Parquet file and pyarrow is missing; pip install 'nostall[parquet]', or "
            "convert the table to CSV"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            known = columns(file.schema_arrow.names, JobRow.model_fields, str(path))
            at = 0
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    at += 1
                    yield f"row {at}", _scaled(row, known)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadJob(f"{path}: not a readable Parquet file: {error}; repair the file") from error
