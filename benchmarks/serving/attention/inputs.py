"""Batches of the attention benchmarks on the GPU, or small ones in Triton's interpreter."""

from __future__ import annotations

import torch

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.winners.on_gpu import GpuBatch
from nostall.serving.batch.ragged import RaggedBatch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
"""Without a GPU small batches run in Triton's interpreter, which computes bf16 wrongly."""
MOST_COPIES = 16 if HAS_GPU else 1


def make_inputs(ragged: RaggedBatch, shape: AttentionShape) -> GpuBatch:
    """Random inputs of a batch."""
    return GpuBatch.of(ragged, shape, DTYPE, DEVICE, MOST_COPIES)


def max_query(inputs: GpuBatch) -> int:
    """Query tokens of the longest sequence."""
    return int(inputs.ragged.query_lengths.max())


def max_keys(inputs: GpuBatch) -> int:
    """Keys of the longest sequence."""
    return int(inputs.ragged.kv_lengths.max())
