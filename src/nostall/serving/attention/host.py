"""Executes task tables on the host, unit by unit, as the kernel does: the CPU's form of it.

It serves machines without a GPU (vLLM's CPU build, tests). Scores and sums are fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nostall.serving.attention.config import AttentionShape
from nostall.serving.tables.columns import (
    FIRST_ROW,
    KV_END,
    KV_HEAD,
    KV_START,
    PARTIAL,
    QUERY_COUNT,
    QUERY_START,
    REDUCTION_KV_HEAD,
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
    tree_masks: Mapping[int, Tensor]
    """bool (query, query) masks by sequence."""


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
    """
    partial: dict[int, tuple[Tensor, Tensor]] = {}
    for task in tables.used_tasks.tolist():
        result, log_sum = _run_unit(shape, task, batch, query, keys, values)
        if task[PARTIAL] < 0:
            _store(shape, task, task[KV_HEAD], batch, result, out)
        else:
            partial[task[PARTIAL]] = (result, log_sum)
    for row in tables.used_reductions.tolist():
        rows = row[QUERY_COUNT] * shape.group
        parts = [partial[row[FIRST_ROW] + split * rows] for split in range(row[SPLITS])]
        log_sums = torch.stack([log_sum for _, log_sum in parts])
        weights = log_sums.softmax(0).nan_to_num(0.0)
        result = sum(
            weight[:, None] * part for weight, (part, _) in zip(weights, parts, strict=True)
        )
        _store(shape, row, row[REDUCTION_KV_HEAD], batch, result, out)


def _run_unit(
    shape: AttentionShape,
    task: list[int],
    batch: HostBatch,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor]:
    """Result (rows, head dimension) and logarithm of the sum of exponentials of one unit."""
    sequence, start, count = task[SEQUENCE], task[QUERY_START], task[QUERY_COUNT]
    first, end, head = task[KV_START], task[KV_END], task[KV_HEAD]
    before = int(batch.kv_lengths[sequence]) - _query_length(batch, sequence)
    base = int(batch.query_starts[sequence]) + start
    group = shape.group
    rows = query[base : base + count, head * group : (head + 1) * group].float()
    positions = torch.arange(first, end)
    pages = batch.block_table[sequence, positions // shape.page_size].long()
    offsets = positions % shape.page_size
    scores = rows @ keys[pages, offsets, head].float().T * shape.score_scale
    if shape.soft_cap > 0:
        scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
    tokens = torch.arange(start, start + count)
    visible = positions <= (before + tokens)[:, None]
    mask = batch.tree_masks.get(sequence)
    if mask is not None:
        own = positions - before
        inside = own >= 0
        visible[:, inside] = mask[tokens][:, own[inside]]
    if shape.window > 0:
        visible &= positions > (before + tokens)[:, None] - shape.window
    scores = scores.masked_fill(~visible[:, None, :], float("-inf")).flatten(0, 1)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum[:, None]).exp().nan_to_num(0.0)
    return weights @ values[pages, offsets, head].float(), log_sum


def _store(
    shape: AttentionShape, row: list[int], head: int, batch: HostBatch, result: Any, out: Tensor
) -> None:
    """Write rows of a result to the output."""
    base = int(batch.query_starts[row[SEQUENCE]]) + row[QUERY_START]
    group = shape.group
    target = out[base : base + row[QUERY_COUNT], head * group : (head + 1) * group]
    target.copy_(result.view(target.shape))


def _query_length(batch: HostBatch, sequence: int) -> int:
    return int(batch.query_starts[sequence + 1] - batch.query_starts[sequence])
