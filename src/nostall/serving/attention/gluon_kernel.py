"""Meta-attention in tiles of 128 rows for Hopper: specialised warps, persistent (Gluon).

A program has three warpgroups: one copies (:mod:`nostall.serving.attention.gluon_copy`), two
compute 64 rows each (:mod:`nostall.serving.attention.gluon_compute`). Tables, layouts and partial
results are those of :mod:`nostall.serving.attention.kernel`.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nostall.serving.attention.gluon_compute import consume
from nostall.serving.attention.gluon_copy import produce


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers, each complete after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def tall_attention(
    query, keys, values, out, block_table, tasks, counts, queue, query_starts, kv_lengths,
    partial, partial_log_sums, scale, value_scale, stride_query_token, stride_query_head,
    stride_out_token, stride_out_head, stride_block, stride_token, stride_head, stride_table,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, QUEUE: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Run all units of a Task-Table whose only tile height is 128, with key tiles of N keys.

    ``QUEUE``: programs take units from the queue; otherwise program i runs unit i.
    """
    DTYPE: gl.constexpr = query.dtype.element_ty
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    units = gl.allocate_shared_memory(gl.int32, [128], LINE)
    q_buffers = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], TILE)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], TILE)
    # The 128 threads that copy arrive when their copies have ended, a warpgroup arrives once.
    unit_full = make_barriers(1, 1)
    unit_empty = make_barriers(1, 2)
    q_full = make_barriers(1, 128)
    q_empty = make_barriers(1, 2)
    k_full = make_barriers(STAGES, 128)
    k_empty = make_barriers(STAGES, 2)
    v_full = make_barriers(STAGES, 128)
    v_empty = make_barriers(STAGES, 2)
    shared = (
        units, unit_full.index(0), unit_empty.index(0), q_buffers, q_full.index(0),
        q_empty.index(0), k_buffers, k_full, k_empty, v_buffers, v_full, v_empty,
    )  # fmt: skip
    computes = (
        out, tasks, query_starts, kv_lengths, partial, partial_log_sums,
        scale * 1.4426950408889634, value_scale, stride_out_token, stride_out_head,
    )  # fmt: skip
    copies = (
        query, keys, values, block_table, tasks, counts, queue, query_starts, stride_query_token,
        stride_query_head, stride_block, stride_token, stride_head, stride_table,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (0, computes, shared, GROUP, STAGES)),
            (consume, (1, computes, shared, GROUP, STAGES)),
            (produce, (copies, shared, GROUP, D, PAGE, N, STAGES, QUEUE)),
        ],
        [4, 4],
        [COMPUTE_REGISTERS, COPY_REGISTERS],
    )
