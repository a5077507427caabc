"""FlashInfer as a peer of the attention benchmark: BatchPrefill on the paged cache (causal).

Needs flashinfer-python 0.6.13 and apache-tvm-ffi in PYTHONPATH; FlashInfer compiles its kernel at
the first call, some 30 s. ``python -m benchmarks.serving.attention.flashinfer`` does only that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.attention.inputs import make_inputs
from nostall.core.errors import MissingPart
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.winners.on_gpu import GpuBatch
from nostall.serving.batch.examples import make_batch

WORKSPACE_BYTES = 256 << 20


def flashinfer(inputs: GpuBatch, folder: Path) -> Callable[[PagedCache], Tensor]:
    """FlashInfer's kernel for ragged batches, planned once, as a serving engine does a step."""
    os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise MissingPart(f"FlashInfer cannot be imported ({error}); it is left out") from error
    ragged, shape, device = inputs.ragged, inputs.shape, inputs.query.device
    page = ragged.page_size
    pages = -(-ragged.kv_lengths // page)
    used = np.arange(ragged.block_table.shape[1])[None, :] < pages[:, None]
    starts = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    last = ((ragged.kv_lengths - 1) % page + 1).astype(np.int32)
    arrays = (ragged.query_starts, starts, ragged.block_table[used].astype(np.int32), last)
    query_starts, page_starts, numbers, last_lengths = (
        torch.from_numpy(array).to(device) for array in arrays
    )
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        query_starts, page_starts, numbers, last_lengths, shape.heads, shape.kv_heads,
        shape.head_dim, page, causal=True, sm_scale=shape.score_scale,
        q_data_type=inputs.query.dtype, kv_data_type=inputs.query.dtype,
    )  # fmt: skip
    out = torch.empty_like(inputs.query)

    def call(cache: PagedCache) -> Tensor:
        wrapper.run(inputs.query, (cache.keys, cache.values), out=out)
        return out

    return call


if __name__ == "__main__":
    small = make_inputs(make_batch([1, 40], [700, 700]), AttentionShape())
    result = flashinfer(small, Path())(small.caches[0])
    print(f"FlashInfer: relative error {small.error(result):.3g}")
