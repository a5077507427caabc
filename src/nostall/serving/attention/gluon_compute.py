"""The warps of the Gluon kernel that compute: a warpgroup has 64 rows of a tile.

Both products of an iteration are asynchronous: the scores of key tile j + 1 and the sum of weights
j and values j. The softmax of one warpgroup runs during the products of the other one
(FlashAttention-3, arXiv:2407.08608, section 3.1). ptxas waits for both products in front of the
softmax; forcing the second wait behind it, or named barriers for turns, made the kernel slower.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
