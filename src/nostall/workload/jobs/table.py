"""Reader for job tables: CSV or Parquet, one job per row, streamed in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from nostall.core.errors import BadJob
from nostall.workload.jobs.precisions import canonical_precision
from nostall.workload.jobs.record import Architecture, Job
from nostall.workload.jobs.table_rows import SkippedRow, TableReader, printable


def _normalise_architecture(value: object) -> object:
    """Accept 'PS/Worker', 'ps_worker' and 'PS-Worker' for 'ps-worker'."""
    if not isinstance(value, str):
        return value
    return value.strip().lower().replace("/", "-").replace("_", "-").replace(" ", "-")


class JobRow(BaseModel):
    """Schema of a table row; the fields are those of :class:`Job`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: Annotated[str, AfterValidator(printable)] | None = None
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
class JobTable:
    """The jobs of a table file, and the rows that were skipped."""

    path: Path
    jobs: tuple[Job, ...]
    skipped_rows: tuple[SkippedRow, ...]
    """The first skipped rows."""
    num_skipped: int
    """Number of all skipped rows."""
    notes: tuple[str, ...] = ()
    """Damage in rows that are used."""


def read_jobs(path: Path) -> JobTable:
    """Read a job table; its columns are fields of :class:`Job` with an optional unit in brackets.

    For example, ``dense_bytes [MB]`` or ``flops [T]``.  A row that does not describe a job is
    skipped and reported in the result.  Raises :class:`~nostall.core.errors.BadJob` if no row
    describes a job.
    """
    reader = TableReader(path, JobRow, ("architecture",))
    jobs: list[Job] = []
    for position, row in reader.rows():
        try:
            jobs.append(Job(**{**row.model_dump(), "name": row.name or f"job {reader.num_rows}"}))
        except BadJob as error:
            reader.skip(position, str(error))
    if not jobs:
        raise reader.nothing_read("job")
    return JobTable(path, tuple(jobs), tuple(reader.skipped_rows), reader.num_skipped, reader.notes)
