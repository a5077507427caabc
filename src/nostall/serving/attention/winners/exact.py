"""Exact attention of sampled query tokens of a paged batch, in fp64 on the batch's device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import PagedCache
from nostall.serving.batch.ragged import RaggedBatch


def sample_tokens(ragged: RaggedBatch, count: int = 32, seed: int = 0) -> NDArray[np.int64]:
    """The first and last tokens of the first and last sequences, and random ones."""
    starts = ragged.query_starts
    tokens = int(starts[-1])
    edges = [0, tokens - 1, min(int(starts[len(ragged) - 1]), tokens - 1)]
    drawn = np.random.default_rng(seed).integers(0, tokens, count)
    return np.unique(np.concatenate([edges, drawn])).astype(np.int64)


def exact_token(
    ragged: RaggedBatch, shape: AttentionShape, query: Tensor, cache: PagedCache, token: int
) -> Tensor:
    """The result of one query token in fp64, (heads, head dimension)."""
    starts = ragged.query_starts
    sequence = int(np.searchsorted(starts, token, side="right")) - 1
    keys = int(ragged.kv_lengths[sequence])
    own = token - int(starts[sequence])
    context = keys - int(ragged.query_lengths[sequence])
    positions = torch.arange(keys, device=query.device)
    seen = positions <= context + own
    if shape.window:
        seen &= positions > context + own - shape.window
    mask = ragged.tree_mask(sequence)
    if mask is not None:
        seen[context:] &= torch.from_numpy(mask[own]).to(query.device)
    at = np.flatnonzero(seen.cpu().numpy())
    pages = torch.from_numpy(ragged.block_table[sequence, at // ragged.page_size]).long()
    slots = torch.from_numpy(at % ragged.page_size)
    index = (pages.to(query.device), slots.to(query.device))
    key, value = (t[index].double().transpose(0, 1) for t in (cache.keys, cache.values))
    rows = query[token].double().view(shape.kv_heads, shape.group, shape.head_dim)
    scores = rows @ key.transpose(1, 2) * shape.score_scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    return (torch.softmax(scores, dim=-1) @ value).reshape(shape.heads, shape.head_dim)
