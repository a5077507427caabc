"""The meta-attention kernel: programs take units of the Task-Table, each unit one of a few tiles.

How programs take units (``SCHEDULE``):

- ``UNIT``: program i runs unit i.
- ``RANGES``: program i runs the units ``program_offsets[i]`` to ``program_offsets[i + 1] - 1``.
- ``QUEUE``: a program takes the next unit when it is free. The first ``front_programs`` programs
  take from the front of the list and the others from its end. With compute-bound units first and
  memory-bound units last, an SM that holds a program of each kind overlaps the two (the aim
  of POD-Attention, arXiv:2410.18038).

Which program runs a unit does not change the result.
"""
# ruff: noqa: N803, N806 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nostall.serving.attention.tile import attend

UNIT = tl.constexpr(0)
RANGES = tl.constexpr(1)
QUEUE = tl.constexpr(2)


@triton.jit
def scratch_rows(row, slot, prefix_row, kv_head, live, GROUP: tl.constexpr):
    """Scratch rows of a unit: ``row``, or for one of a shared prefix those of ``prefix_rows``."""
    if slot < -1:
        first = tl.load(prefix_row + 1, mask=live, other=0).to(tl.int64)
        split_rows = tl.load(prefix_row + 2, mask=live, other=0).to(tl.int64)
        head_rows = tl.load(prefix_row + 3, mask=live, other=0).to(tl.int64)
        head = tl.arange(0, row.shape[0]) % GROUP
        row = first + (-2 - slot) * split_rows + kv_head * head_rows + head
    return row


@triton.jit
def unit_masks(
    tree_offset, tree_words, token, first_token, tokens, end, context, query_length, slot, window,
    WINDOW: tl.constexpr, TREE: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """What the rows of a unit see: their tree words, and ``before``, ``low``, ``clear_begin`` and
    ``clear_end`` of :func:`nostall.serving.attention.tile.attend`."""
    tree = token.to(tl.int64)
    before = query_length - first_token
    clear_end = context + first_token + 1
    low = 0
    clear_begin = 0
    if TREE:
        offset = tl.load(tree_offset)
        words = tl.where(offset >= 0, tokens, 0)
        if PREFIX:
            words = tl.where(slot < -1, 0, words)
        tree = tl.load(tree_words + offset + first_token + token, mask=token < words, other=-1)
        clear_end = tl.where(offset >= 0, context, clear_end)
    if PREFIX:
        # Give row 0 the position of the last shared key; the causal mask then hides nothing.
        before = tl.where(slot < -1, context + query_length - end + 1, before)
        clear_end = tl.where(slot < -1, end, clear_end)
    if WINDOW:
        low = context + first_token - window + 1
        clear_begin = context + first_token + tokens - window
    return tree, before, low, clear_begin, clear_end


@triton.jit
def load_queries(pointers, live, out):
    """Query rows; those in fp8 in the dtype of the results, in which they are exact.

    Keys and values follow the dtype of these rows.
    """
    rows = tl.load(pointers, mask=live, other=0.0)
    if rows.dtype.is_fp8():
        rows = rows.to(out.dtype.element_ty)
    return rows


@triton.jit
def run_unit(
    task, query, keys, values, out, block_table, query_starts, kv_lengths, tree_offsets, tree_words,
    prefix_rows, partial, partial_log_sums, scale, value_scale, soft_cap, window,
    stride_query_token, stride_query_head, stride_out_token, stride_out_head, stride_block,
    stride_token, stride_head, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    MASKS: tl.constexpr, SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    PREFIX: tl.constexpr,
):  # fmt: skip
    """Run the unit of one task row with a tile of M rows and key tiles of N keys.

    ``PREFIX``: the unit may be one of a shared prefix (without it, no unit of the tables is). Its
    query tokens are those of rows of ``prefix_rows``, and each of them sees all of its keys.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence, first_token, tokens = tl.load(task), tl.load(task + 1), tl.load(task + 2)
    begin, end = tl.load(task + 3), tl.load(task + 4)
    kv_head, slot = tl.load(task + 5), tl.load(task + 7)
    query_start = tl.load(query_starts + sequence)
    query_length = tl.load(query_starts + sequence + 1) - query_start
    context = tl.load(kv_lengths + sequence) - query_length

    rows = tl.arange(0, M)
    dims = tl.arange(0, DIMS)
    token = rows // GROUP
    live = (token < tokens)[:, None] & (dims < D)[None, :]
    at = (query_start + first_token + token).to(tl.int64)
    if PREFIX:
        prefix_row = prefix_rows + (first_token + token) * 4
        packed = tl.load(prefix_row, mask=token < tl.where(slot < -1, tokens, 0), other=0)
        at = tl.where(slot < -1, packed.to(tl.int64), at)
    head = kv_head * GROUP + rows % GROUP
    rows_of_query = query + at * stride_query_token + head * stride_query_head
    tile = load_queries(rows_of_query[:, None] + dims[None, :], live, out)
    tree, before, low, clear_begin, clear_end = unit_masks(
        tree_offsets + sequence, tree_words, token, first_token, tokens, end, context,
        query_length, slot, window, WINDOW, TREE, PREFIX,
    )  # fmt: skip
    from_head = kv_head.to(tl.int64) * stride_head
    result, log_sum = attend(
        tile, keys + from_head, values + from_head,
        block_table + sequence.to(tl.int64) * stride_table,
        begin, end, low, kv_lengths + sequence, before, clear_begin, clear_end, scale, soft_cap,
        window, tree, context, stride_block, stride_token,
        PAGE, D, N, STAGES, GROUP, MASKS, SOFT_CAP, WINDOW, TREE,
    )  # fmt: skip
    result = result * value_scale
    is_result = slot < 0
    if PREFIX:
        is_result = slot == -1
    if is_result:
        to_out = at * stride_out_token + head * stride_out_head
        tl.store(out + to_out[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=live)
    else:
        row = slot.to(tl.int64) + rows
        if PREFIX:
            row = scratch_rows(row, slot, prefix_row, kv_head, token < tokens, GROUP)
        tl.store(partial + row[:, None] * D + dims[None, :], result, mask=live)
        tl.store(partial_log_sums + row, log_sum, mask=token < tokens)


@triton.jit
def take_unit(queue, units, front_programs, FRONT_SHIFT: tl.constexpr = 32):
    """The next unit of a double-ended queue for this program, or -1 if all units are taken.

    ``queue[0]`` counts units taken from the front in its low 32 bits, and from the end in its high
    32 bits, so that one atomic operation reads both counts.
    """
    is_front = tl.program_id(0) < front_programs
    one = tl.full([], 1, tl.int64)
    taken = tl.atomic_add(queue, tl.where(is_front, one, one << FRONT_SHIFT), sem="relaxed")
    from_front = (taken & 0xFFFFFFFF).to(tl.int32)
    from_end = (taken >> FRONT_SHIFT).to(tl.int32)
    unit = tl.where(is_front, from_front, units - 1 - from_end)
    return tl.where(from_front + from_end < units, unit, -1)


@triton.jit
def leave_queue(queue):
    """Count this program as finished; the last one empties the queue for the next launch."""
    finished = tl.atomic_add(queue + 1, tl.full([], 1, tl.int64), sem="acq_rel")
    if finished == tl.num_programs(0) - 1:
        tl.store(queue, tl.full([], 0, tl.int64))
        tl.store(queue + 1, tl.full([], 0, tl.int64))


@triton.jit
def run_tiles(
    task, query, keys, values, out, block_table, query_starts, kv_lengths, tree_offsets, tree_words,
    prefix_rows, partial, partial_log_sums, scale, value_scale, soft_cap, window,
    stride_query_token, stride_query_head, stride_out_token, stride_out_head, stride_block,
    stride_token, stride_head, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PAGE: tl.constexpr, TILES: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """Run the unit of a task row with the tile that it names."""
    tile = tl.load(task + 6)
    for index in tl.static_range(len(TILES)):
        if tile == index:
            run_unit(
                task, query, keys, values, out, block_table, query_starts, kv_lengths,
                tree_offsets, tree_words, prefix_rows, partial, partial_log_sums, scale,
                value_scale, soft_cap, window, stride_query_token, stride_query_head,
                stride_out_token, stride_out_head, stride_block, stride_token, stride_head,
                stride_table, HEADS, KV_HEADS, D, DIMS, PAGE, TILES[index][0], TILES[index][1],
                TILES[index][2], TILES[index][3], SOFT_CAP, WINDOW, TREE, PREFIX,
            )  # fmt: skip


@triton.jit(do_not_specialize=["front_programs", "window"])
def meta_attention(
    query, keys, values, out, block_table, tasks, program_offsets, counts, queue, front_programs,
    query_starts, kv_lengths, tree_offsets, tree_words, prefix_rows, partial, partial_log_sums,
    scale, value_scale, soft_cap, window, stride_query_token, stride_query_head, stride_out_token,
    stride_out_head, stride_block, stride_token, stride_head, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    PAGE: tl.constexpr, TILES: tl.constexpr, SCHEDULE: tl.constexpr,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, PREFIX: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run all units of the Task-Table.

    ``query`` and ``out`` are (tokens, heads, D), ``keys`` and ``values`` (blocks, PAGE, KV heads,
    D) with the same strides. ``TILES`` has (rows, keys, stages, masks) for each tile.
    ``DEPENDENT``: the reduction may be loaded onto SMs as they become free (programmatic dependent
    launch); it waits there for the end of this kernel.

    ``scale`` and ``value_scale`` are numbers, or for queries in fp8 (number, pointer to the factor
    of queries, pointer to that of keys) and a pointer: a CUDA graph must read those of its replay.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if query.dtype.element_ty.is_fp8():
        scale = scale[0] * tl.load(scale[1]) * tl.load(scale[2])
        value_scale = tl.load(value_scale)
    program = tl.program_id(0)
    unit = program
    end = tl.load(counts)
    if SCHEDULE == RANGES:
        unit = tl.load(program_offsets + program)
        end = tl.load(program_offsets + program + 1)
    units = end
    if SCHEDULE == QUEUE:
        unit = take_unit(queue, units, front_programs)
        end = tl.where(unit < 0, -1, units)
    while unit < end:
        run_tiles(
            tasks + unit * 8, query, keys, values, out, block_table, query_starts, kv_lengths,
            tree_offsets, tree_words, prefix_rows, partial, partial_log_sums, scale, value_scale,
            soft_cap, window, stride_query_token, stride_query_head, stride_out_token,
            stride_out_head, stride_block, stride_token, stride_head, stride_table, HEADS, KV_HEADS,
            D, DIMS, PAGE, TILES, SOFT_CAP, WINDOW, TREE, PREFIX,
        )  # fmt: skip
        if SCHEDULE == QUEUE:
            unit = take_unit(queue, units, front_programs)
            end = tl.where(unit < 0, -1, units)
        elif SCHEDULE == RANGES:
            unit += 1
        else:
            unit = end
    if SCHEDULE == QUEUE:
        leave_queue(queue)
