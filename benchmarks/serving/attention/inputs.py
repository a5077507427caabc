"""Tensors of an attention batch on a GPU, and its exact result for sampled query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import BatchTensors, PagedCache
from nostall.serving.attention.winners.exact import exact_token, sample_tokens
from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.batch.trees import pack_trees

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
"""Without a GPU small batches run in Triton's interpreter, which computes bf16 wrongly."""
ROTATED_BYTES = 256 << 20
"""Bytes of all copies of the cache at least, so that the L2 cache (50 MB) does not hold them."""
TOLERANCE = 2e-2
"""Allowed error of bf16 results, relative to the largest exact value."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """One batch with its tensors; the caches hold different values."""

    ragged: RaggedBatch
    shape: AttentionShape
    query: Tensor
    caches: tuple[PagedCache, ...]
    batch: BatchTensors
    sampled: Tensor
    """Query tokens (rows of ``query``) whose results are checked."""
    exact: Tensor
    """Their results with ``caches[0]`` in fp64, (sampled, heads, head dimension)."""

    @property
    def max_query(self) -> int:
        return int(self.ragged.query_lengths.max())

    @property
    def max_keys(self) -> int:
        return int(self.ragged.kv_lengths.max())

    def error(self, out: Tensor) -> float:
        """Largest error of the sampled tokens, relative to the largest exact value."""
        got = out[self.sampled].double()
        return float((got - self.exact).abs().max() / self.exact.abs().max())


def make_inputs(ragged: RaggedBatch, shape: AttentionShape, seed: int = 0) -> Inputs:
    """Random bf16 inputs of a batch."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tokens = int(ragged.query_lengths.sum())
    blocks = int(np.max(ragged.block_table, initial=0)) + 1
    cache_shape = (blocks, ragged.page_size, shape.kv_heads, shape.head_dim)
    cache_bytes = 4 * int(np.prod(cache_shape))

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=DEVICE, dtype=DTYPE)

    copies = min(max(2, -(-ROTATED_BYTES // cache_bytes)), 16) if HAS_GPU else 1
    caches = tuple(PagedCache(draw(*cache_shape), draw(*cache_shape)) for _ in range(copies))
    query = draw(tokens, shape.heads, shape.head_dim)
    # A width that is a multiple of 16 keeps Triton from compiling a kernel for each width.
    width = -(-ragged.block_table.shape[1] // 16) * 16
    table = np.zeros((len(ragged), width), np.int32)
    table[:, : ragged.block_table.shape[1]] = np.maximum(ragged.block_table, 0)
    batch = BatchTensors.of(
        ragged.query_starts, ragged.kv_lengths, table, pack_trees(ragged), DEVICE
    )
    sampled = sample_tokens(ragged)
    exact = torch.stack([exact_token(ragged, shape, query, caches[0], int(t)) for t in sampled])
    return Inputs(ragged, shape, query, caches, batch, torch.from_numpy(sampled).to(DEVICE), exact)
