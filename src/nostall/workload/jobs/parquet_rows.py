"""Rows of a Parquet file; a damaged row group costs its rows, a damaged value costs its row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nostall.core.errors import BadJob, MissingPart, one_line
from nostall.core.files.pointers import check_content

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
