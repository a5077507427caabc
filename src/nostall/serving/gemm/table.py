"""The table over M: how each product of a linear layer runs on one GPU with given versions.

An entry holds for the Ms behind the row before it, up to its own M; it was measured at both ends
of them. An algorithm of cuBLASLt runs only where the library says that it can compute that M.
Where the table says nothing, F.linear runs.
"""

from __future__ import annotations

import bisect
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.core.validation import first_problem
from nostall.serving.gemm.config import GemmConfig, LinearShape

FORMAT: Literal["nostall-gemm-table-1"] = "nostall-gemm-table-1"


@dataclass(frozen=True, slots=True)
class Cublas:
    """F.linear, as PyTorch calls it."""


@dataclass(frozen=True, slots=True)
class Padded:
    """F.linear on a copy of x with M rounded up to a multiple of ``multiple``."""

    multiple: int


@dataclass(frozen=True, slots=True)
class LtAlgorithm:
    """An algorithm of cuBLASLt, as the library's 64 bytes."""

    algorithm: bytes


Entry = Cublas | Padded | LtAlgorithm | GemmConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One row: the largest M that it is for, and how products run."""

    m: int
    entry: Entry
    ratio: float = 1.0
    """Time of F.linear / time of the entry when it was chosen."""
    low: float = 1.0
    """Lower end of the ratio's 95 % interval in the second measurement."""


@dataclass(frozen=True)
class GemmTable:
    """Rows of one layer, in ascending M, with the GPU and versions that they were measured on."""

    shape: LinearShape
    gpu: str
    versions: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...] = field(default=())

    def entry(self, m: int) -> Entry:
        """How a product with ``m`` rows runs."""
        index = bisect.bisect_left([row.m for row in self.rows], m)
        if index == len(self.rows):
            return Cublas()
        return self.rows[index].entry


class _Row(pydantic.BaseModel):
    """A row of a table file; the fields of its kind are set."""

    model_config = pydantic.ConfigDict(extra="forbid")

    m: Annotated[int, pydantic.Field(ge=1)]
    kind: Literal["cublas", "padded", "cublaslt", "triton"]
    ratio: float = 1.0
    low: float = 1.0
    multiple: Annotated[int, pydantic.Field(ge=1)] = 1
    algorithm: str = ""
    config: tuple[int, int, int, int, int, int, bool, int] | None = None


class _Layer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    columns: int
    depth: int
    dtype: str
    rows: list[_Row]


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    format: Literal["nostall-gemm-table-1"]
    gpu: str
    versions: dict[str, str]
    layers: list[_Layer]


def save_tables(path: Path, tables: list[GemmTable]) -> None:
    """Write the tables of one model; all are of one GPU."""
    layers = [
        _Layer(
            columns=table.shape.columns,
            depth=table.shape.depth,
            dtype=table.shape.dtype,
            rows=[_to_file(row) for row in table.rows],
        )
        for table in tables
    ]
    file = _File(format=FORMAT, gpu=tables[0].gpu, versions=dict(tables[0].versions), layers=layers)
    write_text_atomically(path, file.model_dump_json(indent=1, exclude_defaults=True))


def load_tables(path: Path, gpu: str, versions: dict[str, str]) -> dict[LinearShape, GemmTable]:
    """The tables of a file, by layer.

    Raises :class:`BadInput` if the file is damaged, or if it was measured on another GPU or with
    other versions: its choices may be slower there, and algorithms of cuBLASLt may not exist.
    """
    try:
        file = _File.model_validate_json(path.read_bytes())
        layers = [(layer, [_from_file(row) for row in layer.rows]) for layer in file.layers]
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, pydantic.ValidationError):
            reason = first_problem(error)
        raise BadInput(
            f"GEMM table {path}: {reason}; write it again with `nostall serving tune`"
        ) from error
    if (file.gpu, file.versions) != (gpu, versions):
        raise BadInput(
            f"GEMM table {path} is for {file.gpu} with {file.versions}, and this is {gpu} with "
            f"{versions}; write it again with `nostall serving tune`"
        )
    tables = {}
    for layer, rows in layers:
        shape = LinearShape(layer.columns, layer.depth, layer.dtype).check()
        if [row.m for row in rows] != sorted({row.m for row in rows}):
            raise BadInput(
                f"GEMM table {path}: the Ms of N={shape.columns} K={shape.depth} are not "
                "ascending; write it again with `nostall serving tune`"
            )
        for row in rows:
            if isinstance(row.entry, GemmConfig) and not row.entry.fits(shape):
                raise BadInput(
                    f"GEMM table {path}: M={row.m} of N={shape.columns} K={shape.depth} has "
                    f"{row.entry}, which the kernel cannot run; write it again with `nostall "
                    "serving tune`"
                )
        tables[shape] = GemmTable(shape, file.gpu, tuple(file.versions.items()), tuple(rows))
    return tables


def _to_file(row: Row) -> _Row:
    made = _Row(m=row.m, kind="cublas", ratio=row.ratio, low=row.low)
    match row.entry:
        case Padded(multiple):
            return made.model_copy(update={"kind": "padded", "multiple": multiple})
        case LtAlgorithm(algorithm):
            return made.model_copy(update={"kind": "cublaslt", "algorithm": algorithm.hex()})
        case GemmConfig() as config:
            return made.model_copy(update={"kind": "triton", "config": astuple(config)})
    return made


def _from_file(row: _Row) -> Row:
    entry: Entry = Cublas()
    if row.kind == "padded":
        entry = Padded(row.multiple)
    elif row.kind == "cublaslt":
        entry = LtAlgorithm(bytes.fromhex(row.algorithm))
        if len(entry.algorithm) != 64:
            raise ValueError(f"an algorithm of {len(entry.algorithm)} bytes; allowed are 64")
    elif row.kind == "triton":
        if row.config is None:
            raise ValueError("a row of kind triton without config")
        entry = GemmConfig(*row.config)
    return Row(row.m, entry, row.ratio, row.low)
