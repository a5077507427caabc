"""Tall tiles of meta-attention for Hopper (Gluon): softmax overlaps the tensor cores.

A tile of 128 query rows computes the scores of key tile j + 1 while it adds the values of key tile
j (the order of FlashAttention-3, arXiv:2407.08608, section 3.2): both products are issued
asynchronously, and the softmax of j + 1 runs during the product of weights j and values j. Keys
and values come from a paged cache by asynchronous copies, ``STAGES`` key tiles deep.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load_pages(pages, first, end, PAGE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Pages of the N keys from ``first`` on; entries from ``end`` on are not read."""
    at = first + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    if N % PAGE == 0:
        place = first // PAGE + gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT)) // PAGE
        return gl.load(pages + place, mask=at < end, other=0)
    return gl.load(pages + at // PAGE, mask=at < end, other=0)


@gluon.jit
def copy_keys(
    buffer, base, page, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the copy of N rows of keys or values into shared memory; rows from ``end`` on are 0."""
    step = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    if N % PAGE == 0:
        inside = step % PAGE
    else:
        inside = (first + step) % PAGE
    offsets = page.to(gl.int64) * stride_block + inside * stride_token
    pointers = base + offsets[:, None] + dims[None, :]
    live = (first + step < end)[:, None] & (dims >= 0)[None, :]
    async_copy.async_copy_global_to_shared(buffer, pointers, mask=live)


@gluon.jit
def hide_keys(scores, first, positions, end, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores with -inf where a row does not see a key."""
    at = first + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    seen = (at < end)[None, :] & (at[None, :] <= positions[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def softmax_step(scores, largest, total, exponent):
    """Weights of the scores, and the factor of earlier sums."""
    now_largest = gl.maximum(largest, gl.max(scores, 1) * exponent)
    # A row that has seen no key keeps -inf; 0 replaces it where differences are formed.
    shift = gl.where(now_largest == float("-inf"), 0.0, now_largest)
    weights = gl.exp2(scores * exponent - shift[:, None])
    decay = gl.exp2(largest - shift)
    return weights, now_largest, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def pin(PIN: gl.constexpr):
    gl.inline_asm_elementwise(PIN + " mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def attend_tall(
    q_buffer, k_buffers, v_buffers, keys, values, pages, begin, end, clear_end, positions,
    exponent, stride_block, stride_token, ready_groups,
    PAGE: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr, PIN: gl.constexpr, DTYPE: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = q_buffer.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    largest = gl.full([M], float("-inf"), gl.float32, ROW)
    total = gl.full([M], 0.0, gl.float32, ROW)
    acc = gl.zeros([M, D], gl.float32, O_LAYOUT)
    none = gl.zeros([M, N], gl.float32, S_LAYOUT)

    # Groups of copies: {query, keys 0}, then {keys t + 1, values t} for t = 0, 1, ...
    page = load_pages(pages, begin, end, PAGE, N, COPY)
    copy_keys(
        k_buffers.index(0), keys, page, begin, end, stride_block, stride_token, PAGE, N, D, COPY
    )
    async_copy.commit_group()
    at = begin
    for t in gl.static_range(STAGES - 1):
        copy_keys(
            v_buffers.index(t), values, page, at, end, stride_block, stride_token, PAGE, N, D, COPY
        )
        at += N
        page = load_pages(pages, at, end, PAGE, N, COPY)
        copy_keys(
            k_buffers.index(t + 1),
            keys,
            page,
            at,
            end,
            stride_block,
            stride_token,
            PAGE,
            N,
            D,
            COPY,
        )
        async_copy.commit_group()
    # ``page`` and ``at`` are those of the last keys in flight, whose values are not yet.
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    scores = warpgroup_mma(
        q_buffer, k_buffers.index(0).permute((1, 0)), none, use_acc=False, is_async=True
    )
    next_page = load_pages(pages, at + N, end, PAGE, N, COPY)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if begin + N > clear_end:
        scores = hide_keys(scores, begin, positions, end, N, S_LAYOUT)
    weights, largest, total, decay = softmax_step(scores, largest, total, exponent)
    p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)

    k_slot = 1
    v_slot = 0
    middle = begin + N + gl.maximum(gl.minimum(clear_end, end) - begin - N, 0) // N * N
    for phase in gl.static_range(2):
        start = begin + N if phase == 0 else middle
        stop = middle if phase == 0 else end
        for first in range(start, stop, N):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            scores_token = warpgroup_mma(
                q_buffer, k_buffers.index(k_slot).permute((1, 0)), none, use_acc=False,
                is_async=True,
            )  # fmt: skip
            if OVERLAP:
                acc_token = warpgroup_mma(p, v_buffers.index(v_slot), acc, is_async=True)
            # Copy into the buffers that the last iteration read.
            to_k = gl.where(k_slot == 0, STAGES - 1, k_slot - 1)
            to_v = gl.where(v_slot == 0, STAGES - 1, v_slot - 1)
            copy_keys(
                v_buffers.index(to_v), values, page, at, end, stride_block, stride_token, PAGE, N,
                D, COPY,
            )  # fmt: skip
            at += N
            page = next_page
            copy_keys(
                k_buffers.index(to_k), keys, page, at, end, stride_block, stride_token, PAGE, N, D,
                COPY,
            )  # fmt: skip
            async_copy.commit_group()
            next_page = load_pages(pages, at + N, end, PAGE, N, COPY)
            if OVERLAP:
                scores = warpgroup_mma_wait(1, deps=[scores_token])
            else:
                scores = warpgroup_mma_wait(0, deps=[scores_token])
                acc_token = warpgroup_mma(p, v_buffers.index(v_slot), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc_token])
            if phase == 1:
                scores = hide_keys(scores, first, positions, end, N, S_LAYOUT)
            weights, largest, total, decay = softmax_step(scores, largest, total, exponent)
            if OVERLAP:
                # ptxas would move the wait in front of the softmax.
                pin(PIN)
                acc, weights = warpgroup_mma_wait(0, deps=[acc_token, weights])
            acc = acc * gl.convert_layout(decay, O_ROW)[:, None]
            p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
            k_slot = gl.where(k_slot == STAGES - 1, 0, k_slot + 1)
            v_slot = gl.where(v_slot == STAGES - 1, 0, v_slot + 1)
    async_copy.wait_group(0)
    fence_async_shared()
    acc = warpgroup_mma(p, v_buffers.index(v_slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    safe = gl.where(total > 0.0, total, 1.0)
    acc = acc / gl.convert_layout(safe, O_ROW)[:, None]
    return acc, largest + gl.log2(total)


@gluon.jit
def run_tall_unit(
    task, query, keys, values, out, block_table, query_starts, kv_lengths, partial,
    partial_log_sums, exponent, value_scale, stride_query_token, stride_query_head,
    stride_out_token, stride_out_head, stride_block, stride_token, stride_head, stride_table,
    q_buffer, k_buffers, v_buffers,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr, DTYPE: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = q_buffer.shape[0]
    sequence = gl.load(task)
    first_token = gl.load(task + 1)
    tokens = gl.load(task + 2)
    begin = gl.load(task + 3)
    end = gl.load(task + 4)
    kv_head = gl.load(task + 5)
    slot = gl.load(task + 7)
    query_start = gl.load(query_starts + sequence)
    query_length = gl.load(query_starts + sequence + 1) - query_start
    context = gl.load(kv_lengths + sequence) - query_length

    rows = gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    token = rows // GROUP
    live = (token < tokens)[:, None] & (dims >= 0)[None, :]
    at = (query_start + first_token + token).to(gl.int64)
    head = kv_head * GROUP + rows % GROUP
    from_query = at * stride_query_token + head * stride_query_head
    async_copy.async_copy_global_to_shared(
        q_buffer, query + from_query[:, None] + dims[None, :], mask=live
    )
    positions = context + first_token + gl.arange(0, M, layout=gl.SliceLayout(1, S_LAYOUT)) // GROUP
    from_head = kv_head.to(gl.int64) * stride_head
    result, log_sum = attend_tall(
        q_buffer, k_buffers, v_buffers, keys + from_head, values + from_head,
        block_table + sequence.to(gl.int64) * stride_table, begin, end,
        context + first_token + 1, positions, exponent, stride_block, stride_token, 0,
        PAGE, D, N, STAGES, OVERLAP, PIN, DTYPE, S_LAYOUT, O_LAYOUT, COPY,
    )  # fmt: skip
    result = result * value_scale
    if slot < 0:
        q_buffer.store(result.to(DTYPE))
        packed = q_buffer.load(COPY)
        to_out = at * stride_out_token + head * stride_out_head
        gl.store(out + to_out[:, None] + dims[None, :], packed, mask=live)
    else:
        o_rows = gl.arange(0, M, layout=gl.SliceLayout(1, O_LAYOUT))
        o_dims = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
        row = slot.to(gl.int64) + o_rows
        o_live = (o_rows // GROUP < tokens)[:, None] & (o_dims >= 0)[None, :]
        gl.store(partial + row[:, None] * D + o_dims[None, :], result, mask=o_live)
        s_rows = gl.arange(0, M, layout=gl.SliceLayout(1, S_LAYOUT))
        gl.store(
            partial_log_sums + slot.to(gl.int64) + s_rows, log_sum, mask=s_rows // GROUP < tokens
        )


@gluon.jit
def take_unit(queue, units):
    """The next unit from the front of the queue, or -1 if all are taken."""
    taken = gl.atomic_add(queue, gl.to_tensor(1).to(gl.int64), sem="relaxed")
    unit = taken.to(gl.int32)
    return gl.where(unit < units, unit, -1)


@gluon.jit
def leave_queue(queue):
    """Count this program as finished; the last one empties the queue for the next launch."""
    one = gl.to_tensor(1).to(gl.int64)
    finished = gl.atomic_add(queue + 1, one, sem="acq_rel")
    if finished == gl.num_programs(0) - 1:
        gl.store(queue, one - 1)
        gl.store(queue + 1, one - 1)


@gluon.jit
def tall_attention(
    query, keys, values, out, block_table, tasks, counts, queue, query_starts, kv_lengths,
    partial, partial_log_sums, scale, value_scale, stride_query_token, stride_query_head,
    stride_out_token, stride_out_head, stride_block, stride_token, stride_head, stride_table,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, PIN: gl.constexpr,
    QUEUE: gl.constexpr,
):  # fmt: skip
    """Run all units of a Task-Table whose only tile height is M."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffer = gl.allocate_shared_memory(DTYPE, [M, D], SHARED)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], SHARED)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], SHARED)
    exponent = scale * 1.4426950408889634
    units = gl.load(counts)
    unit = gl.program_id(0)
    if QUEUE:
        unit = take_unit(queue, units)
    while (unit >= 0) & (unit < units):
        run_tall_unit(
            tasks + unit * 8, query, keys, values, out, block_table, query_starts, kv_lengths,
            partial, partial_log_sums, exponent, value_scale, stride_query_token,
            stride_query_head, stride_out_token, stride_out_head, stride_block, stride_token,
            stride_head, stride_table, q_buffer, k_buffers, v_buffers, HEADS // KV_HEADS, D, PAGE,
            N, STAGES, OVERLAP, PIN, DTYPE, S_LAYOUT, O_LAYOUT, COPY,
        )  # fmt: skip
        if QUEUE:
            unit = take_unit(queue, units)
        else:
            unit = units
    if QUEUE:
        leave_queue(queue)
