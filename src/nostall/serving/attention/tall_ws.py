"""Tall tiles by specialised warps: one warpgroup copies keys, two compute 64 rows each (Gluon)."""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nostall.serving.attention.tall import hide_keys, pin, softmax_step


@gluon.jit
def page_offsets(
    pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FULL: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Offsets of the N keys from ``first`` on, shape (N,)."""
    if N % PAGE == 0 and PAGE % 8 == 0:
        # Each thread loads the number of a page once, not once for each of its keys.
        PAGES: gl.constexpr = N // PAGE
        CUBE: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 256 // D, D // 8], [1, 4, 1], [2, 1, 0]
        )
        PLANE: gl.constexpr = gl.SliceLayout(2, CUBE)
        number = gl.arange(0, PAGES, layout=gl.SliceLayout(1, PLANE))
        if FULL:
            page = gl.load(pages + first // PAGE + number)
        else:
            page = gl.load(
                pages + first // PAGE + number, mask=first + number * PAGE < end, other=0
            )
        inside = gl.arange(0, PAGE, layout=gl.SliceLayout(0, PLANE))
        start = page.to(gl.int64) * stride_block
        offsets = start[:, None] + (inside * stride_token).to(gl.int64)[None, :]
        offsets = gl.convert_layout(gl.reshape(offsets, [N]), gl.SliceLayout(1, COPY))
        # The compiler does not see through reshape that strides are multiples of 16 bytes.
        return gl.multiple_of(offsets, [8])
    else:
        at = first + gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
        page = gl.load(pages + at // PAGE, mask=at < end, other=0)
        return page.to(gl.int64) * stride_block + (at % PAGE) * stride_token


@gluon.jit
def copy_tile(
    buffer, full, empty, phase, base, pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FULL: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy N rows of keys or values when the buffer is empty; rows from ``end`` on become 0."""
    offsets = page_offsets(pages, first, end, stride_block, stride_token, PAGE, N, D, FULL, COPY)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    pointers = base + offsets[:, None] + dims[None, :]
    mbarrier.wait(empty, phase ^ 1)
    if FULL:
        async_copy.async_copy_global_to_shared(buffer, pointers)
    else:
        live = first + gl.arange(0, N, layout=gl.SliceLayout(1, COPY)) < end
        async_copy.async_copy_global_to_shared(
            buffer, pointers, mask=live[:, None] & (dims >= 0)[None, :]
        )
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_either(
    buffers, full, empty, tile, base, pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Copy a tile of keys or values into its buffer; a tile behind ``end`` is left out."""
    slot = tile % STAGES
    phase = tile // STAGES & 1
    if first + N <= end:
        copy_tile(
            buffers.index(slot), full.index(slot), empty.index(slot), phase, base, pages, first,
            end, stride_block, stride_token, PAGE, N, D, True, COPY,
        )  # fmt: skip
    elif first < end:
        copy_tile(
            buffers.index(slot), full.index(slot), empty.index(slot), phase, base, pages, first,
            end, stride_block, stride_token, PAGE, N, D, False, COPY,
        )  # fmt: skip


@gluon.jit
def produce(
    query, keys, values, block_table, tasks, program_offsets, counts, query_starts, kv_lengths,
    stride_query_token, stride_query_head, stride_block, stride_token, stride_head, stride_table,
    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, RANGES: gl.constexpr,
):  # fmt: skip
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    H: gl.constexpr = q_buffers.shape[1]
    unit = gl.program_id(0)
    stop = unit + 1
    if RANGES:
        stop = gl.load(program_offsets + unit + 1)
        unit = gl.load(program_offsets + unit)
    else:
        stop = gl.minimum(stop, gl.load(counts))
    tile = 0
    turn = 0
    while unit < stop:
        task = tasks + unit * 8
        sequence = gl.load(task)
        first_token = gl.load(task + 1)
        tokens = gl.load(task + 2)
        begin = gl.load(task + 3)
        end = gl.load(task + 4)
        kv_head = gl.load(task + 5)
        query_start = gl.load(query_starts + sequence)
        pages = block_table + sequence.to(gl.int64) * stride_table
        from_head = kv_head.to(gl.int64) * stride_head
        copy_either(
            k_buffers, k_full, k_empty, tile, keys + from_head, pages, begin, end, stride_block,
            stride_token, PAGE, N, D, STAGES, COPY,
        )  # fmt: skip

        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
        for half in gl.static_range(2):
            rows = half * H + gl.arange(0, H, layout=gl.SliceLayout(1, COPY))
            token = rows // GROUP
            at = (query_start + first_token + token).to(gl.int64)
            head = kv_head * GROUP + rows % GROUP
            from_query = at * stride_query_token + head * stride_query_head
            async_copy.async_copy_global_to_shared(
                q_buffers.index(half),
                query + from_query[:, None] + dims[None, :],
                mask=(token < tokens)[:, None] & (dims >= 0)[None, :],
            )
        async_copy.mbarrier_arrive(q_full, increment_count=False)
        turn += 1

        for first in range(begin, end, N):
            copy_either(
                k_buffers, k_full, k_empty, tile + 1, keys + from_head, pages, first + N, end,
                stride_block, stride_token, PAGE, N, D, STAGES, COPY,
            )  # fmt: skip
            copy_either(
                v_buffers, v_full, v_empty, tile, values + from_head, pages, first, end,
                stride_block, stride_token, PAGE, N, D, STAGES, COPY,
            )  # fmt: skip
            tile += 1
        unit += 1


@gluon.jit
def consume(
    HALF: gl.constexpr,
    out, tasks, program_offsets, counts, query_starts, kv_lengths, partial, partial_log_sums,
    exponent, value_scale, stride_out_token, stride_out_head,
    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    GROUP: gl.constexpr, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
    RANGES: gl.constexpr, PIN: gl.constexpr, TURNS: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_buffers.dtype
    M: gl.constexpr = q_buffers.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    q_buffer = q_buffers.index(HALF)
    none = gl.zeros([M, N], gl.float32, S_LAYOUT)
    if TURNS and HALF == 1:
        # The first turn is that of the other warpgroup.
        pin("bar.arrive 10, 256;")
    unit = gl.program_id(0)
    stop = unit + 1
    if RANGES:
        stop = gl.load(program_offsets + unit + 1)
        unit = gl.load(program_offsets + unit)
    else:
        stop = gl.minimum(stop, gl.load(counts))
    tile = 0
    turn = 0
    while unit < stop:
        task = tasks + unit * 8
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
        first_row = HALF * M
        clear_end = context + first_token + first_row // GROUP + 1
        positions = context + first_token + (first_row + gl.arange(0, M, layout=ROW)) // GROUP
        largest = gl.full([M], float("-inf"), gl.float32, ROW)
        total = gl.full([M], 0.0, gl.float32, ROW)
        acc = gl.zeros([M, D], gl.float32, O_LAYOUT)

        mbarrier.wait(q_full, turn & 1)
        k_slot = tile % STAGES
        mbarrier.wait(k_full.index(k_slot), tile // STAGES & 1)
        fence_async_shared()
        token = warpgroup_mma(
            q_buffer, k_buffers.index(k_slot).permute((1, 0)), none, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(k_empty.index(k_slot), count=1)
        if begin + N > clear_end:
            scores = hide_keys(scores, begin, positions, end, N, S_LAYOUT)
        weights, largest, total, decay = softmax_step(scores, largest, total, exponent)
        p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)

        middle = begin + N + gl.maximum(gl.minimum(clear_end, end) - begin - N, 0) // N * N
        for phase in gl.static_range(2):
            start = begin + N if phase == 0 else middle
            limit = middle if phase == 0 else end
            for first in range(start, limit, N):
                k_slot = (tile + 1) % STAGES
                v_slot = tile % STAGES
                mbarrier.wait(k_full.index(k_slot), (tile + 1) // STAGES & 1)
                mbarrier.wait(v_full.index(v_slot), tile // STAGES & 1)
                if FENCE:
                    fence_async_shared()
                if TURNS:
                    pin("bar.sync 10, 256;" if HALF == 0 else "bar.sync 11, 256;")
                token = warpgroup_mma(
                    q_buffer, k_buffers.index(k_slot).permute((1, 0)), none, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                acc_token = warpgroup_mma(p, v_buffers.index(v_slot), acc, is_async=True)
                if TURNS:
                    pin("bar.arrive 11, 256;" if HALF == 0 else "bar.arrive 10, 256;")
                scores = warpgroup_mma_wait(1, deps=[token])
                mbarrier.arrive(k_empty.index(k_slot), count=1)
                if phase == 1:
                    scores = hide_keys(scores, first, positions, end, N, S_LAYOUT)
                weights, largest, total, decay = softmax_step(scores, largest, total, exponent)
                pin(PIN)
                acc, weights = warpgroup_mma_wait(0, deps=[acc_token, weights])
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                acc = acc * gl.convert_layout(decay, O_ROW)[:, None]
                p = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
                tile += 1
        v_slot = tile % STAGES
        mbarrier.wait(v_full.index(v_slot), tile // STAGES & 1)
        fence_async_shared()
        token = warpgroup_mma(p, v_buffers.index(v_slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        tile += 1
        safe = gl.where(total > 0.0, total, 1.0)
        result = acc / gl.convert_layout(safe, O_ROW)[:, None] * value_scale
        if slot < 0:
            q_buffer.store(result.to(DTYPE))
            packed = q_buffer.load(COPY)
            rows = first_row + gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
            dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
            at = (query_start + first_token + rows // GROUP).to(gl.int64)
            to_out = at * stride_out_token + (kv_head * GROUP + rows % GROUP) * stride_out_head
            live = (rows // GROUP < tokens)[:, None] & (dims >= 0)[None, :]
            gl.store(out + to_out[:, None] + dims[None, :], packed, mask=live)
        else:
            o_rows = first_row + gl.arange(0, M, layout=O_ROW)
            o_dims = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
            row = slot.to(gl.int64) + o_rows
            o_live = (o_rows // GROUP < tokens)[:, None] & (o_dims >= 0)[None, :]
            gl.store(partial + row[:, None] * D + o_dims[None, :], result, mask=o_live)
            s_rows = first_row + gl.arange(0, M, layout=ROW)
            gl.store(
                partial_log_sums + slot.to(gl.int64) + s_rows,
                largest + gl.log2(total),
                mask=s_rows // GROUP < tokens,
            )
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        unit += 1


@gluon.jit
def tall_attention(
    query, keys, values, out, block_table, tasks, program_offsets, counts, query_starts,
    kv_lengths, partial, partial_log_sums, scale, value_scale, stride_query_token,
    stride_query_head, stride_out_token, stride_out_head, stride_block, stride_token, stride_head,
    stride_table,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, PIN: gl.constexpr,
    RANGES: gl.constexpr, REGS: gl.constexpr, COPY_REGS: gl.constexpr, TURNS: gl.constexpr,
    FENCE: gl.constexpr,
):  # fmt: skip
    """Run all units of a Task-Table whose only tile height is M = 128."""
    DTYPE: gl.constexpr = query.dtype.element_ty
    GROUP: gl.constexpr = HEADS // KV_HEADS
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffers = gl.allocate_shared_memory(DTYPE, [2, M // 2, D], SHARED)
    k_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], SHARED)
    v_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, N, D], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=128)
        mbarrier.init(v_empty.index(i), count=2)
    exponent = scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (
                consume,
                (
                    0, out, tasks, program_offsets, counts, query_starts, kv_lengths, partial,
                    partial_log_sums, exponent, value_scale, stride_out_token, stride_out_head,
                    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, GROUP, D, N, STAGES, RANGES, PIN, TURNS, FENCE,
                ),
            ),
            (
                consume,
                (
                    1, out, tasks, program_offsets, counts, query_starts, kv_lengths, partial,
                    partial_log_sums, exponent, value_scale, stride_out_token, stride_out_head,
                    q_buffers, k_buffers, v_buffers, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, GROUP, D, N, STAGES, RANGES, PIN, TURNS, FENCE,
                ),
            ),
            (
                produce,
                (
                    query, keys, values, block_table, tasks, program_offsets, counts, query_starts,
                    kv_lengths, stride_query_token, stride_query_head, stride_block, stride_token,
                    stride_head, stride_table, q_buffers, k_buffers, v_buffers, q_full, q_empty,
                    k_full, k_empty, v_full, v_empty, GROUP, D, PAGE, N, STAGES, RANGES,
                ),
            ),
        ],
        [4, 4],
        [REGS, COPY_REGS],
    )  # fmt: skip
