"""Reader for step tables: measured times of data-parallel steps on one and on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nostall.workload.jobs.table import (
    OWN_NAMES,
    ColumnNames,
    SkippedRow,
    TableReader,
    printable,
    table_fields,
)

MAX_NODES = 1_000_000
_REQUIRED = ("nodes", "seconds", "gradient_bytes")


class StepRow(BaseModel):
    """Schema of a row of a step table."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    model: Annotated[str, AfterValidator(printable)] = "model"
    nodes: int = Field(ge=1, le=MAX_NODES)
    gpus: int = Field(default=1, ge=1, le=4096)
    """GPUs of the fullest node."""
    batch: float = Field(default=1.0, gt=0, le=1e12)
    """Samples per GPU."""
    seconds: float = Field(ge=1e-9, le=1e6)
    """Measured seconds of a step."""
    gradient_bytes: float = Field(ge=0, le=1e15)
    """Bytes of the gradients that the GPUs exchange."""


@dataclass(frozen=True, slots=True)
class StepTable:
    """The rows of a step table, and the rows that were skipped."""

    path: Path
    steps: tuple[StepRow, ...]
    skipped_rows: tuple[SkippedRow, ...]
    num_skipped: int
    """Number of all skipped rows."""
    notes: tuple[str, ...]
    """Damage in rows that are used."""


def is_step_table(path: Path, names: ColumnNames = OWN_NAMES) -> bool:
    """Whether the header of a table has the columns of a step table, and not those of jobs."""
    fields = table_fields(path, names)
    return "architecture" not in fields and {"nodes", "seconds"} <= fields


def read_steps(path: Path, names: ColumnNames = OWN_NAMES) -> StepTable:
    """Read a step table; its columns are fields of :class:`StepRow`, with units in brackets.

    For example, ``seconds [ms]``.  ``names`` are those of the columns in a table of others.  Rows
    that are not valid are skipped and reported in the result.
    Raises :class:`~nostall.core.errors.BadJob` if no row is valid.
    """
    reader = TableReader(path, StepRow, _REQUIRED, names)
    steps = tuple(row for _, row in reader.rows())
    if not steps:
        raise reader.nothing_read("measured step")
    return StepTable(path, steps, tuple(reader.skipped_rows), reader.num_skipped, reader.notes)
