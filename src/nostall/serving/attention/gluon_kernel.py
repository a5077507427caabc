"""Meta-attention in tiles of 128 rows for Hopper: specialised warps, persistent (Gluon).

A program has three warpgroups: one takes units and copies query rows, keys and values
(:func:`produce`), two compute 64 rows each (:func:`consume`). Tables, layouts and partial
results are those of :mod:`nostall.serving.attention.kernel`.
"""
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


@gluon.jit
def hide_keys(scores, first, positions, end):
    """Scores with -inf where a row does not see a key."""
    N: gl.constexpr = scores.shape[1]
    at = first + gl.arange(0, N, layout=gl.SliceLayout(0, scores.type.layout))
    seen = (at < end)[None, :] & (at[None, :] <= positions[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def softmax_step(scores, largest, total, exponent):
    """One step of the online softmax: weights, the new sums, and the factor of earlier sums.

    ``exponent`` times a score is a base-2 exponent; ``largest`` is such an exponent.
    """
    now_largest = gl.maximum(largest, gl.max(scores, 1) * exponent)
    # A row that has seen no key keeps -inf; 0 replaces it where differences are formed.
    shift = gl.where(now_largest == float("-inf"), 0.0, now_largest)
    weights = gl.exp2(scores * exponent - shift[:, None])
    decay = gl.exp2(largest - shift)
    return weights, now_largest, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def add_tile(
    q_buffer, k_buffers, k_full, k_empty, v_buffers, v_full, v_empty, tile, first, end, positions,
    exponent, weights, largest, total, result,
    STAGES: gl.constexpr, MASKED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Add the values of ``tile`` by its ``weights``; return the weights of the next key tile.

    ``first`` is the first key of the next tile.
    """
    M: gl.constexpr = q_buffer.shape[0]
    N: gl.constexpr = k_buffers.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    RESULT: gl.constexpr = result.type.layout
    none = gl.zeros([M, N], gl.float32, SCORES)
    k_slot = (tile + 1) % STAGES
    v_slot = tile % STAGES
    mbarrier.wait(k_full.index(k_slot), (tile + 1) // STAGES & 1)
    mbarrier.wait(v_full.index(v_slot), tile // STAGES & 1)
    fence_async_shared()
    scores = warpgroup_mma(
        q_buffer, k_buffers.index(k_slot).permute((1, 0)), none, use_acc=False, is_async=True
    )
    summed = warpgroup_mma(weights, v_buffers.index(v_slot), result, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    if MASKED:
        scores = hide_keys(scores, first, positions, end)
    exact, largest, total, decay = softmax_step(scores, largest, total, exponent)
    result = warpgroup_mma_wait(0, deps=[summed])
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    result = result * gl.convert_layout(decay, gl.SliceLayout(1, RESULT))[:, None]
    weights = gl.convert_layout(exact.to(q_buffer.dtype), gl.DotOperandLayout(0, RESULT, 2))
    return weights, largest, total, result


@gluon.jit
def attend_rows(
    q_buffer, k_buffers, k_full, k_empty, v_buffers, v_full, v_empty, tile, begin, end, clear_end,
    positions, exponent,
    STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows over the keys ``begin`` to ``end``; ``tile`` counts key tiles.

    All rows see the keys in front of ``clear_end``. Returns the result, the base-2 logarithm of the
    sum of exponents, and the next tile.
    """
    M: gl.constexpr = q_buffer.shape[0]
    N: gl.constexpr = k_buffers.shape[1]
    D: gl.constexpr = q_buffer.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    largest = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.full([M], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    result = gl.zeros([M, D], gl.float32, RESULT)
    none = gl.zeros([M, N], gl.float32, SCORES)

    k_slot = tile % STAGES
    mbarrier.wait(k_full.index(k_slot), tile // STAGES & 1)
    fence_async_shared()
    scores = warpgroup_mma(
        q_buffer, k_buffers.index(k_slot).permute((1, 0)), none, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(k_slot), count=1)
    if begin + N > clear_end:
        scores = hide_keys(scores, begin, positions, end)
    exact, largest, total, _ = softmax_step(scores, largest, total, exponent)
    weights = gl.convert_layout(exact.to(q_buffer.dtype), gl.DotOperandLayout(0, RESULT, 2))

    middle = begin + N + gl.maximum(gl.minimum(clear_end, end) - begin - N, 0) // N * N
    for first in range(begin + N, middle, N):
        weights, largest, total, result = add_tile(
            q_buffer, k_buffers, k_full, k_empty, v_buffers, v_full, v_empty, tile, first, end,
            positions, exponent, weights, largest, total, result, STAGES, False, HALF,
        )  # fmt: skip
        tile += 1
    for first in range(middle, end, N):
        weights, largest, total, result = add_tile(
            q_buffer, k_buffers, k_full, k_empty, v_buffers, v_full, v_empty, tile, first, end,
            positions, exponent, weights, largest, total, result, STAGES, True, HALF,
        )  # fmt: skip
        tile += 1

    v_slot = tile % STAGES
    mbarrier.wait(v_full.index(v_slot), tile // STAGES & 1)
    fence_async_shared()
    result = warpgroup_mma(weights, v_buffers.index(v_slot), result, is_async=True)
    result = warpgroup_mma_wait(0, deps=[result])
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    safe = gl.where(total > 0.0, total, 1.0)
    result = result / gl.convert_layout(safe, gl.SliceLayout(1, RESULT))[:, None]
    return result, largest + gl.log2(total), tile + 1


@gluon.jit
def store_output(
    result, buffer, out, first_token_row, tokens, kv_head, stride_token, stride_head,
    GROUP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Write 64 rows to the output, through shared memory, so that a warp writes whole rows."""
    M: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    buffer.store(result.to(buffer.dtype))
    packed = buffer.load(COPY)
    rows = HALF * M + gl.arange(0, M, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    at = (first_token_row + rows // GROUP).to(gl.int64) * stride_token
    at += (kv_head * GROUP + rows % GROUP) * stride_head
    live = (rows // GROUP < tokens)[:, None] & (dims >= 0)[None, :]
    gl.store(out + at[:, None] + dims[None, :], packed, mask=live)


@gluon.jit
def store_partial(
    result, log_sum, partial, partial_log_sums, slot, tokens,
    GROUP: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Write 64 rows, from row ``slot`` of the unit on, to the partial results."""
    M: gl.constexpr = result.shape[0]
    D: gl.constexpr = result.shape[1]
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, result.type.layout))
    rows = HALF * M + gl.arange(0, M, layout=gl.SliceLayout(1, result.type.layout))
    live = (rows // GROUP < tokens)[:, None] & (dims >= 0)[None, :]
    at = (slot.to(gl.int64) + rows) * D
    gl.store(partial + at[:, None] + dims[None, :], result, mask=live)
    places = HALF * M + gl.arange(0, M, layout=log_sum.type.layout)
    sums = partial_log_sums + slot.to(gl.int64) + places
    gl.store(sums, log_sum, mask=places // GROUP < tokens)


@gluon.jit
def hear_unit(turn, units, full, empty):
    """The unit that the warps that copy tell; -1 at the end."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full, turn & 1)
    unit = gl.max(units.load(LINE), 0)
    mbarrier.arrive(empty, count=1)
    return unit


@gluon.jit
def consume(HALF: gl.constexpr, arguments, shared, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Compute the rows ``HALF * 64`` to ``HALF * 64 + 63`` of the units that are told."""
    (
        out, tasks, query_starts, kv_lengths, partial, partial_log_sums, exponent, value_scale,
        stride_token, stride_head,
    ) = arguments  # fmt: skip
    (
        units, unit_full, unit_empty, q_buffers, q_full, q_empty, k_buffers, k_full, k_empty,
        v_buffers, v_full, v_empty,
    ) = shared  # fmt: skip
    M: gl.constexpr = q_buffers.shape[1]
    N: gl.constexpr = k_buffers.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    q_buffer = q_buffers.index(HALF)
    tile = 0
    turn = 0
    unit = hear_unit(turn, units, unit_full, unit_empty)
    while unit >= 0:
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
        position = gl.load(kv_lengths + sequence) - query_length + first_token
        rows = HALF * M + gl.arange(0, M, layout=gl.SliceLayout(1, SCORES))
        mbarrier.wait(q_full, turn & 1)
        result, log_sum, tile = attend_rows(
            q_buffer, k_buffers, k_full, k_empty, v_buffers, v_full, v_empty, tile, begin,
            end, position + HALF * M // GROUP + 1, position + rows // GROUP, exponent, STAGES,
            HALF,
        )  # fmt: skip
        result = result * value_scale
        if slot < 0:
            store_output(
                result, q_buffer, out, query_start + first_token, tokens, kv_head, stride_token,
                stride_head, GROUP, HALF,
            )  # fmt: skip
        else:
            store_partial(result, log_sum, partial, partial_log_sums, slot, tokens, GROUP, HALF)
        mbarrier.arrive(q_empty, count=1)
        turn += 1
        unit = hear_unit(turn, units, unit_full, unit_empty)


if hasattr(async_copy, "async_load"):
    start_copy = async_copy.async_load
else:  # Triton before 3.9
    start_copy = async_copy.async_copy_global_to_shared


@gluon.jit
def page_offsets(
    pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, FULL: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Offsets in the cache of the N keys from ``first`` on; pages from ``end`` on are not read.

    ``first`` is a multiple of N. ``FULL``: all N keys are in front of ``end``.
    """
    if N % PAGE == 0:
        # A thread loads the number of a page once, not once for each of its keys.
        CUBE: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 256 // D, D // 8], [1, 4, 1], [2, 1, 0]
        )
        PLANE: gl.constexpr = gl.SliceLayout(2, CUBE)
        number = gl.arange(0, N // PAGE, layout=gl.SliceLayout(1, PLANE))
        entries = pages + first // PAGE + number
        if FULL:
            page = gl.load(entries)
        else:
            page = gl.load(entries, mask=first + number * PAGE < end, other=0)
        inside = gl.arange(0, PAGE, layout=gl.SliceLayout(0, PLANE))
        offsets = (page.to(gl.int64) * stride_block)[:, None] + (inside * stride_token)[None, :]
        offsets = gl.convert_layout(gl.reshape(offsets, [N]), gl.SliceLayout(1, COPY))
    else:
        at = first + gl.arange(0, N, layout=gl.SliceLayout(1, COPY))
        page = gl.load(pages + at // PAGE, mask=at < end, other=0)
        offsets = page.to(gl.int64) * stride_block + (at % PAGE) * stride_token
    # The launch checks the strides; the compiler does not see them through reshape.
    return gl.multiple_of(offsets, [8])


@gluon.jit
def copy_tile(
    buffers, full, empty, tile, base, pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    FULL: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy N rows of keys or values when their buffer is empty; rows from ``end`` on become 0."""
    slot = tile % STAGES
    buffer = buffers.index(slot)
    offsets = page_offsets(pages, first, end, stride_block, stride_token, PAGE, N, D, FULL, COPY)
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    pointers = base + offsets[:, None] + dims[None, :]
    mbarrier.wait(empty.index(slot), (tile // STAGES & 1) ^ 1)
    if FULL:
        start_copy(buffer, pointers)
    else:
        live = first + gl.arange(0, N, layout=gl.SliceLayout(1, COPY)) < end
        mask = live[:, None] & (dims >= 0)[None, :]
        start_copy(buffer, pointers, mask=mask)
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def copy_keys(
    buffers, full, empty, tile, base, pages, first, end, stride_block, stride_token,
    PAGE: gl.constexpr, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Copy a tile of keys or values; one that begins behind ``end`` does not exist."""
    if first + N <= end:
        copy_tile(
            buffers, full, empty, tile, base, pages, first, end, stride_block, stride_token, PAGE,
            N, D, STAGES, True, COPY,
        )  # fmt: skip
    elif first < end:
        copy_tile(
            buffers, full, empty, tile, base, pages, first, end, stride_block, stride_token, PAGE,
            N, D, STAGES, False, COPY,
        )  # fmt: skip


@gluon.jit
def copy_query(
    buffers, full, query, first_row, tokens, kv_head, stride_token, stride_head,
    GROUP: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Copy the rows of a unit into the buffers of the two warpgroups; rows without a token are 0.

    ``first_row`` is the row of the unit's first token in the packed queries.
    """
    HALF: gl.constexpr = buffers.shape[1]
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))
    for half in gl.static_range(2):
        rows = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, COPY))
        token = rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        offsets = (first_row + token).to(gl.int64) * stride_token + head * stride_head
        start_copy(
            buffers.index(half),
            query + offsets[:, None] + dims[None, :],
            mask=(token < tokens)[:, None] & (dims >= 0)[None, :],
        )
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def take_unit(queue, number, units, QUEUE: gl.constexpr):
    """A unit, or -1 if none is left: the next one of the queue, or the one of this number."""
    if QUEUE:
        number = gl.atomic_add(queue, gl.to_tensor(1).to(gl.int64), sem="relaxed").to(gl.int32)
    return gl.where(number < units, number, -1)


@gluon.jit
def leave_queue(queue):
    """Count this program as finished; the last one empties the queue for the next launch."""
    one = gl.to_tensor(1).to(gl.int64)
    finished = gl.atomic_add(queue + 1, one, sem="acq_rel")
    if finished == gl.num_programs(0) - 1:
        gl.store(queue, one - 1)
        gl.store(queue + 1, one - 1)


@gluon.jit
def tell_unit(unit, turn, units, full, empty):
    """Tell the warpgroups that compute their next unit, or -1 at the end."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(empty, (turn & 1) ^ 1)
    units.store(gl.full([128], 0, gl.int32, LINE) + unit)
    mbarrier.arrive(full, count=1)


@gluon.jit
def produce(
    arguments, shared,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, QUEUE: gl.constexpr,
):  # fmt: skip
    """Take units, tell the warpgroups that compute, and copy what they read."""
    (
        query, keys, values, block_table, tasks, counts, queue, query_starts, stride_query_token,
        stride_query_head, stride_block, stride_token, stride_head, stride_table,
    ) = arguments  # fmt: skip
    (
        units, unit_full, unit_empty, q_buffers, q_full, q_empty, k_buffers, k_full, k_empty,
        v_buffers, v_full, v_empty,
    ) = shared  # fmt: skip
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    count = gl.load(counts)
    unit = take_unit(queue, gl.program_id(0), count, QUEUE)
    tile = 0
    turn = 0
    while unit >= 0:
        tell_unit(unit, turn, units, unit_full, unit_empty)
        task = tasks + unit * 8
        sequence = gl.load(task)
        first_token = gl.load(task + 1)
        tokens = gl.load(task + 2)
        begin = gl.load(task + 3)
        end = gl.load(task + 4)
        kv_head = gl.load(task + 5)
        first_row = gl.load(query_starts + sequence) + first_token
        pages = block_table + sequence.to(gl.int64) * stride_table
        from_head = kv_head.to(gl.int64) * stride_head
        copy_keys(
            k_buffers, k_full, k_empty, tile, keys + from_head, pages, begin, end, stride_block,
            stride_token, PAGE, N, D, STAGES, COPY,
        )  # fmt: skip
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        copy_query(
            q_buffers, q_full, query, first_row, tokens, kv_head, stride_query_token,
            stride_query_head, GROUP, D, COPY,
        )  # fmt: skip
        for first in range(begin, end, N):
            copy_keys(
                k_buffers, k_full, k_empty, tile + 1, keys + from_head, pages, first + N, end,
                stride_block, stride_token, PAGE, N, D, STAGES, COPY,
            )  # fmt: skip
            copy_keys(
                v_buffers, v_full, v_empty, tile, values + from_head, pages, first, end,
                stride_block, stride_token, PAGE, N, D, STAGES, COPY,
            )  # fmt: skip
            tile += 1
        unit = take_unit(queue, count, count, QUEUE)
        turn += 1
    tell_unit(-1, turn, units, unit_full, unit_empty)
    if QUEUE:
        leave_queue(queue)


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
