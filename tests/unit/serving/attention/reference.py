"""Exact attention of a ragged batch in fp64, straight from the definition."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.serving.attention.config import AttentionShape
from nostall.serving.batch.ragged import RaggedBatch

Floats = NDArray[np.float64]


def seen_keys(batch: RaggedBatch, shape: AttentionShape, sequence: int) -> NDArray[np.bool_]:
    """Which keys each query token of a sequence sees, (query, keys)."""
    query, keys = int(batch.query_lengths[sequence]), int(batch.kv_lengths[sequence])
    at, positions = np.arange(keys)[None, :], np.arange(keys - query, keys)[:, None]
    seen = at <= positions
    if shape.window:
        seen &= at > positions - shape.window
    mask = batch.tree_mask(sequence)
    if mask is not None:
        seen[:, keys - query :] &= mask
    return seen


def exact_attention(
    batch: RaggedBatch, shape: AttentionShape, query: Floats, keys: Floats, values: Floats
) -> Floats:
    """The result (tokens, heads, head dimension); ``keys`` and ``values`` are the paged cache."""
    out = np.zeros(query.shape)
    starts = batch.query_starts
    for sequence in range(len(batch)):
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        if rows.start == rows.stop:
            continue
        at = np.arange(batch.kv_lengths[sequence])
        pages = batch.block_table[sequence, at // batch.page_size]
        seen = seen_keys(batch, shape, sequence)
        # Keys before the window of all rows may be anything, NaN too.
        first = int(seen.any(0).argmax())
        index, seen = (pages[first:], at[first:] % batch.page_size), seen[:, first:]
        for head in range(shape.heads):
            kv_head = head // shape.group
            key, value = (t[index][:, kv_head].astype(np.float64) for t in (keys, values))
            scores = query[rows, head].astype(np.float64) @ key.T * shape.score_scale
            if shape.soft_cap:
                scores = shape.soft_cap * np.tanh(scores / shape.soft_cap)
            weights = np.exp(np.where(seen, scores - scores.max(1, keepdims=True), -np.inf))
            out[rows, head] = weights @ value / weights.sum(1, keepdims=True)
    return out
