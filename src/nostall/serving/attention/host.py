"""Executes task tables on the host, unit by unit, as the kernel does: the CPU's form of it.

It serves machines without a GPU (vLLM's CPU build, tests). Scores and sums are fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nostall.serving.attention.config import AttentionShape, check_prefixes
from nostall.serving.tables.columns import (
    FIRST_PREFIX_SPLIT,
    FIRST_ROW,
    KV_END,
    KV_HEAD,
    KV_START,
    PARTIAL,
    PREFIX_FIRST_ROW,
    PREFIX_HEAD_ROWS,
    PREFIX_QUERY,
    PREFIX_ROWS,
    PREFIX_SPLIT_ROWS,
    QUERY_COUNT,
    QUERY_START,
    REDUCTION_KV_HEAD,
    SCRATCH_ROWS,
    SEQUENCE,
    SPLITS,
)
from nostall.serving.tables.settings import TaskTables

Int32s = np.ndarray[Any, np.dtype[np.int32]]


class HostBatch(NamedTuple):
    """Lengths and pages of a batch, on the host."""

    query_starts: Int32s
    """First row of each sequence in the packed queries, and the total, shape (S + 1,)."""
    kv_lengths: Int32s
    block_table: Tensor
    """int32 (S, blocks)."""


def execute(
    shape: AttentionShape,
    tables: TaskTables,
    batch: HostBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
) -> None:
    """Attention of packed queries (tokens, heads, head dimension) into ``out``, of that shape.

    ``keys`` and ``values`` are (blocks, page, KV heads, head dimension) with any strides.

    Raises :class:`BadInput` for tables with shared prefixes if the shape has none.
    """
    check_prefixes(shape, bool(tables.counts[PREFIX_ROWS]))
    rows = int(tables.counts[SCRATCH_ROWS])
    partial, log_sums = torch.empty(rows, shape.head_dim), torch.empty(rows)
    for task in tables.used_tasks.tolist():
        is_prefix = task[PARTIAL] <= FIRST_PREFIX_SPLIT
        tokens = _prefix_tokens(tables, task) if is_prefix else _own_tokens(batch, task)
        result, log_sum = _run_unit(shape, task, batch, query[tokens], keys, values, is_prefix)
        if task[PARTIAL] == -1:
            _store(shape, tokens, task[KV_HEAD], result, out)
            continue
        at = task[PARTIAL] + torch.arange(len(result))
        if is_prefix:
            at = _prefix_scratch_rows(tables, task, shape.group)
        partial[at], log_sums[at] = result, log_sum
    for row in tables.used_reductions.tolist():
        count = row[QUERY_COUNT] * shape.group
        parts = slice(row[FIRST_ROW], row[FIRST_ROW] + row[SPLITS] * count)
        weights = log_sums[parts].view(-1, count, 1).softmax(0).nan_to_num(0.0)
        result = (weights * partial[parts].view(-1, count, shape.head_dim)).sum(0)
        _store(shape, _own_tokens(batch, row), row[REDUCTION_KV_HEAD], result, out)


def _own_tokens(batch: HostBatch, row: list[int]) -> Tensor:
    """Rows of the query tokens of a unit or reduction in the packed queries."""
    return (
        int(batch.query_starts[row[SEQUENCE]]) + row[QUERY_START] + torch.arange(row[QUERY_COUNT])
    )


def _prefix_tokens(tables: TaskTables, task: list[int]) -> Tensor:
    """Rows of the query tokens of a unit of a shared prefix in the packed queries."""
    rows = tables.prefix_rows[task[QUERY_START] :][: task[QUERY_COUNT]]
    return torch.from_numpy(rows[:, PREFIX_QUERY].astype(np.int64))


def _prefix_scratch_rows(tables: TaskTables, task: list[int], group: int) -> Tensor:
    """Scratch rows of a unit of a shared prefix."""
    rows = tables.prefix_rows[task[QUERY_START] :][: task[QUERY_COUNT]].astype(np.int64)
    split = FIRST_PREFIX_SPLIT - task[PARTIAL]
    first = rows[:, PREFIX_FIRST_ROW] + split * rows[:, PREFIX_SPLIT_ROWS]
    first += task[KV_HEAD] * rows[:, PREFIX_HEAD_ROWS]
    return torch.from_numpy((first[:, None] + np.arange(group)).reshape(-1))


def _run_unit(
    shape: AttentionShape,
    task: list[int],
    batch: HostBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sees_all: bool,
) -> tuple[Tensor, Tensor]:
    """Result (rows, head dimension) and logarithm of the sum of exponentials of one unit.

    ``query``: its tokens, (tokens, heads, head dimension). ``sees_all``: each sees all keys.
    """
    sequence, start, count = task[SEQUENCE], task[QUERY_START], task[QUERY_COUNT]
    first, end, head = task[KV_START], task[KV_END], task[KV_HEAD]
    query_length = batch.query_starts[sequence + 1] - batch.query_starts[sequence]
    before = int(batch.kv_lengths[sequence] - query_length)
    group = shape.group
    rows = query[:, head * group : (head + 1) * group].float()
    positions = torch.arange(first, end)
    pages = batch.block_table[sequence, positions // shape.page_size].long()
    offsets = positions % shape.page_size
    scores = rows @ keys[pages, offsets, head].float().T * shape.score_scale
    if shape.soft_cap > 0:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    tokens = torch.arange(start, start + count)
    visible = positions <= (before + tokens)[:, None]
    if sees_all:
        visible = torch.ones_like(visible)
    if shape.window > 0:
        visible &= positions > (before + tokens)[:, None] - shape.window
    scores = scores.masked_fill(~visible[:, None, :], float("-inf")).flatten(0, 1)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[:, None]).exp().nan_to_num(0.0)
    return weights @ values[pages, offsets, head].float(), log_sum


def _store(shape: AttentionShape, tokens: Tensor, head: int, result: Tensor, out: Tensor) -> None:
    """Write the rows of a result to the output."""
    group = shape.group
    heads = result.view(len(tokens), group, shape.head_dim).to(out.dtype)
    out[tokens, head * group : (head + 1) * group] = heads
