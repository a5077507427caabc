"""Batch files: a ragged batch as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from nostall.core.validation import first_problem
from nostall.serving.batch.checks import check_batch
from nostall.serving.batch.ragged import PrefixGroup, RaggedBatch
from nostall.serving.errors import BadBatch

_INT32 = 2**31 - 1
Length = Annotated[int, pydantic.Field(ge=0, le=_INT32)]
Page = Annotated[int, pydantic.Field(ge=-_INT32, le=_INT32)]
MAX_SEQUENCES = 65_536
"""Most sequences of a batch file."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _Sequence(_Strict):
    """One sequence of a batch file."""

    query: Length
    keys: Length
    pages: list[Page]
    speculative: bool = False
    tree: list[list[bool]] | None = None


class _Group(_Strict):
    sequences: list[Length]
    tokens: Length


class _BatchFile(_Strict):
    """Content of a batch file."""

    format: Literal["nostall-batch-1"]
    page_size: Length
    speculative_limit: Length = 32
    sequences: Annotated[list[_Sequence], pydantic.Field(max_length=MAX_SEQUENCES)]
    prefix_groups: list[_Group] = []


def load_batch(path: Path) -> RaggedBatch:
    """The checked batch of a file. Raises :class:`BadBatch` with the place of the first problem."""
    try:
        file = _BatchFile.model_validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        raise BadBatch(
            f"batch file {path}: {first_problem(error, 'the document')}; `nostall serving batch` "
            "writes an example"
        ) from error
    try:
        batch = _to_batch(file)
        check_batch(batch)
    except BadBatch as error:
        raise BadBatch(f"batch file {path}: {error}") from error
    return batch


def _to_batch(file: _BatchFile) -> RaggedBatch:
    sequences = file.sequences
    table = np.full(
        (len(sequences), max((len(s.pages) for s in sequences), default=0)), -1, np.int32
    )
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    masks = []
    for number, sequence in enumerate(sequences):
        rows = sequence.tree
        if rows is not None and any(len(row) != len(rows) for row in rows):
            raise BadBatch(
                f"sequence {number}: the rows of the tree mask have other lengths than the number "
                "of rows; give a square of true and false"
            )
        masks.append(None if rows is None else np.array(rows, np.bool_).reshape(len(rows), -1))
    return RaggedBatch(
        np.array([sequence.query for sequence in sequences], np.int32),
        np.array([sequence.keys for sequence in sequences], np.int32),
        table,
        file.page_size,
        np.array([sequence.speculative for sequence in sequences], np.bool_),
        tuple(masks) if any(mask is not None for mask in masks) else (),
        file.speculative_limit,
        tuple(PrefixGroup(tuple(g.sequences), g.tokens) for g in file.prefix_groups),
    )


def dump_batch(batch: RaggedBatch) -> str:
    """The text of a batch file."""
    used = -(-batch.kv_lengths // batch.page_size)
    sequences = []
    for number in range(len(batch)):
        mask = batch.tree_mask(number)
        sequences.append(
            _Sequence(
                query=int(batch.query_lengths[number]),
                keys=int(batch.kv_lengths[number]),
                pages=batch.block_table[number, : used[number]].tolist(),
                speculative=bool(batch.speculative[number]),
                tree=None if mask is None else mask.tolist(),
            )
        )
    file = _BatchFile(
        format="nostall-batch-1",
        page_size=batch.page_size,
        speculative_limit=batch.speculative_limit,
        sequences=sequences,
        prefix_groups=[
            _Group(sequences=list(group.sequences), tokens=group.tokens)
            for group in batch.prefix_groups
        ],
    )
    return file.model_dump_json(exclude_defaults=False, exclude_none=True) + "\n"
