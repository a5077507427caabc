"""Launches of the Gluon kernel for tiles of 128 rows, and the conditions under which it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape, KernelConfig

if TYPE_CHECKING:
    from nostall.serving.attention.launch import AttentionBuffers, BatchTensors, PagedCache

COMPUTE_REGISTERS, COPY_REGISTERS = 224, 56
"""Registers of a thread that computes, and of one that copies; 2 x 224 + 56 fit on an SM."""
COPIED_ELEMENTS = 8
"""Elements of one asynchronous copy (16 bytes); strides must be multiples of it."""
CAPABILITY = (9, 0)
"""Compute capability that has warpgroup products."""
CHECKED_TRITON = ("3.6",)
"""Versions of Triton whose code of this kernel's variants ran on a GPU; Gluon is experimental."""


def supports_gluon(shape: AttentionShape) -> bool:
    """Whether the Gluon kernel computes this shape: plain causal attention, heads of 64 or 128."""
    plain = shape.window == 0 and shape.soft_cap == 0
    plain = plain and not shape.has_trees and not shape.has_prefixes
    return plain and shape.head_dim in (64, 128)


def has_gluon_kernel(device: torch.device) -> bool:
    """Whether a device and the installed Triton can run the Gluon kernel."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    return ".".join(triton.__version__.split(".")[:2]) in CHECKED_TRITON


def launch_gluon(
    shape: AttentionShape,
    config: KernelConfig,
    programs: int,
    query: Tensor,
    cache: PagedCache,
    out: Tensor,
    batch: BatchTensors,
    buffers: AttentionBuffers,
) -> None:
    """Launch the Gluon kernel. Raises :class:`BadInput` if it does not support the inputs."""
    check_gluon(shape, query, cache, out)
    from nostall.serving.attention.gluon_kernel import tall_attention

    tables, (tile,) = buffers.tables, config.tiles
    tall_attention[(programs,)](
        query, cache.keys, cache.values, out, batch.block_table, tables.tasks, tables.counts,
        buffers.queue, batch.query_starts, batch.kv_lengths, buffers.partial,
        buffers.partial_log_sums, shape.score_scale, 1.0,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), cache.keys.stride(0),
        cache.keys.stride(1), cache.keys.stride(2), batch.block_table.stride(0),
        HEADS=shape.heads, KV_HEADS=shape.kv_heads, D=shape.head_dim, PAGE=shape.page_size,
        N=tile.keys, STAGES=tile.stages, QUEUE=config.schedule == "queue",
        COMPUTE_REGISTERS=COMPUTE_REGISTERS, COPY_REGISTERS=COPY_REGISTERS, num_warps=4,
    )  # fmt: skip


def check_gluon(shape: AttentionShape, query: Tensor, cache: PagedCache, out: Tensor) -> None:
    """Raise :class:`BadInput` if the Gluon kernel does not support a shape or tensors."""
    if not supports_gluon(shape):
        raise BadInput(
            f"the Gluon kernel got head dimension {shape.head_dim}, window {shape.window}, soft "
            f"cap {shape.soft_cap}, trees {shape.has_trees} and shared prefixes "
            f"{shape.has_prefixes}; allowed are heads of 64 or 128 without the others; take a "
            "plan in Triton"
        )
    dtypes = {query.dtype, cache.keys.dtype, out.dtype}
    if len(dtypes) != 1 or query.dtype not in (torch.bfloat16, torch.float16):
        raise BadInput(
            f"the Gluon kernel got dtypes {query.dtype} and {cache.keys.dtype}; allowed is one of "
            "bfloat16 and float16 for queries and cache; take a plan in Triton"
        )
    strides = (*query.stride()[:2], *out.stride()[:2], *cache.keys.stride()[:3])
    if any(stride % COPIED_ELEMENTS for stride in strides):
        raise BadInput(
            f"the Gluon kernel got the strides {strides}; allowed are multiples of "
            f"{COPIED_ELEMENTS} elements; take a plan in Triton"
        )
