"""The warps of the Gluon kernel that take units and copy query rows, keys and values.

Copies are ``cp.async`` instructions that gather by the page table; each buffer has a barrier that
says *full* and one that says *empty*.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

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
