"""Reader for job tables: CSV or Parquet, one job per row, streamed in bounded memory.

Rows of a table file, CSV or Parquet, as cells by field name in base units.

Parser for the header of a job table: the job field and the unit of each column.

Rows of a CSV file, plain or gzipped; a damaged line costs the row that it is in.

Rows of a Parquet file; a damaged row group costs its rows, a damaged value costs its row.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from nostall.core.errors import BadInput, BadJob, MissingPart, one_line
from nostall.core.files.atomic import check_content
from nostall.core.files.text_blocks import TextBlocks
from nostall.core.text.plurals import pluralize
from nostall.core.text.suggest import unknown, wrong_separator
from nostall.workload.jobs.record import Architecture, Job, canonical_precision

_HEADER = re.compile(r"\s*(\w+)\s*(?:\[\s*([^\]]*?)\s*\])?\s*")
DECIMAL_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTE_UNITS = {
    f"{prefix}B": factor for prefix, factor in {**DECIMAL_PREFIXES, **BINARY_PREFIXES}.items()
}
_FLOP_UNITS = {
    **DECIMAL_PREFIXES,
    **{f"{prefix}FLOP": factor for prefix, factor in DECIMAL_PREFIXES.items()},
}
_SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_HOUR_UNITS = {"h": 1.0, "s": 1 / 3600, "min": 1 / 60, "d": 24.0}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a job table."""

    field: str
    """Name of the field of :class:`~nostall.workload.jobs.record.Job`."""
    factor: float
    """Converts a cell from the unit of the header to the base unit (FLOP, bytes, hours)."""


ColumnNames = Mapping[str, str]
"""Field with an optional unit (``flops [T]``) by the name of its column in a table of others."""
OWN_NAMES: ColumnNames = {}
"""The columns of a table have the names of the fields."""


def parse_column_names(options: Iterable[str]) -> ColumnNames:
    """The names that ``FIELD=NAME`` options give.

    Raises :class:`~nostall.core.errors.BadInput` for options of another form, and for two fields of
    one column.
    """
    names: dict[str, str] = {}
    for option in options:
        field, equals, name = (part.strip() for part in option.partition("="))
        if not (equals and name and _HEADER.fullmatch(field)):
            raise BadInput(
                f"--column {option!r} is not FIELD=NAME; write for example --column "
                "'flops [T]=tflop_per_step'"
            )
        if name in names:
            raise BadInput(
                f"--column {option!r}: {name!r} is the column of {names[name]!r}; give each column "
                "one field"
            )
        names[name] = field
    return names


def parse_header(
    headers: Iterable[str],
    fields: Collection[str],
    table: str,
    required: Sequence[str],
    names: ColumnNames = OWN_NAMES,
) -> dict[str, Column]:
    """Map each header cell (``flops [T]``) to its :class:`Column`.

    ``table`` names the file in error messages.  With ``names``, columns that are no field are left
    out.  Raises :class:`~nostall.core.errors.BadJob` if a column or a unit is unknown, if a field
    occurs twice, or if one of ``required`` or of ``names`` is missing.
    """
    headers = list(headers)
    columns: dict[str, Column] = {}
    renamed = field_names(names.values())
    for given in names:
        if given not in {header.strip() for header in headers}:
            raise BadJob(f"{table}: {unknown('column', given, headers)}; correct --column")
    for header in headers:
        match = _HEADER.fullmatch(names.get(header.strip(), header))
        name = match[1].lower() if match else header
        is_other = match is None or name not in fields
        if names and header.strip() not in names and (is_other or name in renamed):
            continue
        if match is None or is_other:
            raise BadJob(
                f"{table}: unknown column {name[:80]!r}; allowed are {', '.join(fields)}, each "
                f"with an optional unit in brackets; required are {', '.join(required)}; rename or "
                "remove the column, or name the columns with --column FIELD=NAME, which leaves "
                "out the others" + wrong_separator(headers)
            )
        if name in {column.field for column in columns.values()}:
            raise BadJob(f"{table}: column {name!r} occurs twice; remove one of them")
        columns[header] = Column(name, _unit_factor(name, match[2], header, table))
    for name in required:
        if name not in {column.field for column in columns.values()}:
            raise BadJob(
                f"{table}: the column {name!r} is missing (columns: "
                f"{', '.join(columns) or 'none'}); a table is a CSV file with a header line, or a "
                f"Parquet file, and has the columns {', '.join(required)}"
            )
    return columns


def field_names(headers: Iterable[str], names: ColumnNames = OWN_NAMES) -> set[str]:
    """The fields that a header names, known or not."""
    fields = (names.get(header.strip(), header) for header in headers)
    return {match[1].lower() for field in fields if (match := _HEADER.fullmatch(field))}


def _unit_factor(name: str, unit: str | None, header: str, table: str) -> float:
    if unit is None:
        return 1.0
    units = _units(name)
    if unit not in units:
        allowed = ", ".join(u for u in units if u) or "none"
        raise BadJob(
            f"{table}: column {header!r} has the unit {unit!r}; allowed units for {name} are "
            f"{allowed}; convert the column"
        )
    return units[unit]


def _units(name: str) -> Mapping[str, float]:
    """Factors of the units that a field may have in its header."""
    if name.endswith("_bytes") or name == "weight_traffic":
        return _BYTE_UNITS
    if name == "flops":
        return _FLOP_UNITS
    if name == "seconds":
        return _SECOND_UNITS
    return _HOUR_UNITS if name == "gpu_hours" else {}


MAX_LINE = 1 << 20
"""Characters of a line; a longer one is no row of a job table."""
_MAX_ROW_LINES = 20
"""Lines of a row whose cells contain line ends."""


@dataclass(slots=True)
class CsvRows:
    """Iterator over (line number, cells) of a CSV file; None for a line that is not CSV."""

    path: Path
    end_damage: str | None = None
    """Cause if the file cannot be read to its end; None: it can."""
    _pushed_back: list[tuple[int, str]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, list[str] | None]]:
        """Yield the rows that are not empty.

        Bytes that are not UTF-8 become U+FFFD.  Raises :class:`~nostall.core.errors.BadJob` if the
        file cannot be opened.
        """
        lines = self._lines()
        while (numbered := self._next(lines)) is not None:
            number, line = numbered
            cells = self._with_line_ends(line, lines) if line.count('"') % 2 else _cells(line)
            if cells is None or any(cells):
                yield number, cells

    def _lines(self) -> Iterator[tuple[int, str]]:
        text = TextBlocks(self.path, error=BadJob)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        number, rest = 0, ""
        for block in text:
            *lines, rest = (rest + decoder.decode(block)).split("\n")
            for line in lines:
                number += 1
                yield number, line
            rest = rest[: MAX_LINE + 1]
        rest += decoder.decode(b"", final=True).rstrip("\n")
        self.end_damage = text.damage
        # A line that the damage cuts off is no row.
        if rest and text.damage is None:
            yield number + 1, rest

    def _next(self, lines: Iterator[tuple[int, str]]) -> tuple[int, str] | None:
        return self._pushed_back.pop() if self._pushed_back else next(lines, None)

    def _with_line_ends(self, line: str, lines: Iterator[tuple[int, str]]) -> list[str] | None:
        """The cells of a row that continues on the next lines; None if no quote closes it."""
        following: list[tuple[int, str]] = []
        while len(following) < _MAX_ROW_LINES and (numbered := self._next(lines)) is not None:
            following.append(numbered)
            if numbered[1].count('"') % 2:
                joined = "\n".join((line, *(text for _, text in following)))
                if (cells := _cells(joined)) is not None:
                    return cells
                break
        self._pushed_back += reversed(following)
        return None


def _cells(line: str) -> list[str] | None:
    if len(line) > MAX_LINE:
        return None
    try:
        rows = list(csv.reader([line.replace("\0", "\ufffd")], strict=True))
    except csv.Error:
        return None
    return rows[0] if rows else []


_BATCH_ROWS = 4096
_MAX_COLUMNS = 1000
_MAX_ROWS = 100_000_000
"""Rows of a file; a larger number is damage."""


def read_parquet(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, Any] | str]]]:
    """(column names, rows) of a file; a row is (number, values by column, or why it is damaged).

    Raises :class:`~nostall.core.errors.BadJob` if the file is not a Parquet file, and
    :class:`~nostall.core.errors.MissingPart` if pyarrow is not installed.
    """
    check_content(path, BadJob)
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingPart(
            f"{path} is a Parquet file and pyarrow is not installed; pip install "
            "'nostall[parquet]', or convert the table to CSV"
        ) from error
    try:
        file = parquet.ParquetFile(path, memory_map=False)
        names = [str(name) for name in file.schema_arrow.names]
        rows = file.metadata.num_rows
    except Exception as error:  # pyarrow raises errors of many classes for damaged metadata
        raise BadJob(
            f"{path}: not a readable Parquet file: {one_line(error)}; repair the file or write it "
            "again"
        ) from error
    if len(names) > _MAX_COLUMNS or not 0 <= rows <= _MAX_ROWS:
        raise BadJob(
            f"{path}: has {len(names)} columns and {rows} rows; allowed are {_MAX_COLUMNS} columns "
            f"and {_MAX_ROWS} rows; write the table again"
        )
    return names, _rows(file)


def _rows(file: Any) -> Iterator[tuple[int, dict[str, Any] | str]]:
    number = 0
    for group in range(file.metadata.num_row_groups):
        first = number
        try:
            group_rows = max(int(file.metadata.row_group(group).num_rows), 0)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                for row in _batch_rows(batch):
                    number += 1
                    yield number, row
        except GeneratorExit:
            raise
        except Exception as error:  # as above, for damaged pages
            yield number + 1, f"row group {group + 1} is damaged: {one_line(error)}"
        number = max(number, first + group_rows)


def _batch_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError, ArithmeticError):
        pass
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except (ValueError, OverflowError, ArithmeticError) as error:
            yield f"a value is damaged: {one_line(error)}"


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

    def __init__(
        self, path: Path, model: type[M], required: Sequence[str], names: ColumnNames = OWN_NAMES
    ) -> None:
        self.path, self.model, self.required, self.names = path, model, required, names
        self.skipped_rows: list[SkippedRow] = []
        """The first :data:`MAX_REASONS` skipped rows."""
        self.num_rows = self.num_skipped = self._num_replaced = 0

    def rows(self) -> Iterator[tuple[str, M]]:
        """(position, row) of each row that fits the model.

        Raises :class:`~nostall.core.errors.BadJob` if the file or its header cannot be read.
        """
        fields = list(self.model.model_fields)
        is_parquet = self.path.name.lower().endswith(".parquet")
        read = _parquet_cells if is_parquet else _csv_cells
        for position, cells in read(self.path, fields, self.required, self.names):
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


def table_fields(path: Path, names: ColumnNames = OWN_NAMES) -> set[str]:
    """The fields that the header of a table names; empty if it cannot be read."""
    try:
        if path.name.lower().endswith(".parquet"):
            return field_names(read_parquet(path)[0], names)
        _, header = next(iter(CsvRows(path)), (1, None))
        return field_names(header or (), names)
    except BadJob:
        return set()


def _csv_cells(
    path: Path, fields: Sequence[str], required: Sequence[str], names: ColumnNames
) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a CSV file, plain or gzipped."""
    file = CsvRows(path)
    rows = iter(file)
    _, header = next(rows, (1, None))
    header = header or []
    columns = parse_header(header, fields, str(path), required, names)
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
    path: Path, fields: Sequence[str], required: Sequence[str], names: ColumnNames
) -> Iterator[tuple[str, Cells]]:
    """(position, cells) of each row of a Parquet file."""
    header, rows = read_parquet(path)
    columns = parse_header(header, fields, str(path), required, names)
    for number, row in rows:
        yield f"row {number}", row if isinstance(row, str) else _convert_units(row, columns)


def _convert_units(row: Mapping[str, Any], columns: Mapping[str, Column]) -> Cells:
    """Cells by field name in base units, or the reason if a cell is not a number."""
    cells = {}
    for header, column in columns.items():
        value = row[header]
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


def read_jobs(path: Path, names: ColumnNames = OWN_NAMES) -> JobTable:
    """Read a job table; its columns are fields of :class:`Job` with an optional unit in brackets.

    For example, ``dense_bytes [MB]`` or ``flops [T]``.  ``names`` are those of the columns in a
    table of others.  A row that does not describe a job is
    skipped and reported in the result.  Raises :class:`~nostall.core.errors.BadJob` if no row
    describes a job.
    """
    reader = TableReader(path, JobRow, ("architecture",), names)
    jobs: list[Job] = []
    for position, row in reader.rows():
        try:
            jobs.append(Job(**{**row.model_dump(), "name": row.name or f"job {reader.num_rows}"}))
        except BadJob as error:
            reader.skip(position, str(error))
    if not jobs:
        raise reader.nothing_read("job")
    return JobTable(path, tuple(jobs), tuple(reader.skipped_rows), reader.num_skipped, reader.notes)
