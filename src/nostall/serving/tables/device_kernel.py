"""Triton kernel that builds the task tables of a batch from lengths on the device, in one launch.

Each program computes the query tiles of the whole batch (:func:`cut_batch`), and writes its
share of the units: those of one class of cost (``TableSettings.cost_classes``), of which it takes
every ``WORKERS``-th block. The rank of a unit, and its place in the Task-Table, are sums over query
tiles and closed forms, so that programs need nothing from each other.

All values are integers; the tables are bit-equal with the host's.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nostall.serving.tables.device_lanes import (
    FRACTION_BITS,
    MAX_COST_NS,
    count_at_most,
    cumsum,
    query_length,
    split_keys_of,
    target_cost,
    tile_of,
    unit_cost,
)
from nostall.serving.tables.prefix.device_forest import choose_nodes, cut_nodes, splits_to


@triton.jit
def cut_batch(
    query_starts, kv_lengths, sequences, leaders, shared, first_rows, deepest, node_tokens, parents,
    branch_costs, branch_tokens, capacity_prefix_rows, capacity_prefix_tiles,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, KV_ALIGN: tl.constexpr,
    LEAST_PREFIX: tl.constexpr, LEAST_SAVED: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of a batch: their number, the counts PREFIX_ROWS and SAVED_NS, their fields.

    The last fields: whether the tile is one of a node; the node that it is of, or that is the
    deepest of its sequence, or -1; first prefix row of a sequence's tile. Then for each node the
    first key, the key behind the last, its query tokens and the node above.
    """
    tile_count, sequence, start, taken, first, end, index = cut_sequences(
        query_starts, kv_lengths, sequences,
        TILE_TOKENS, LIMITS, GROUP, WINDOW, KV_ALIGN, BLOCK_S, BLOCK_T,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK_T)
    is_node = lane < 0
    node = lane * 0 - 1
    prefix_row = lane * 0
    node_start = tl.arange(0, BLOCK_S) * 0
    reach = node_start
    tokens = node_start
    parent = node_start - 1
    prefix_count = tile_count * 0
    saved_ns = prefix_count
    if LEAST_PREFIX > 0:
        node_start, reach, tokens, parent, tiles, prefix_count, saved_ns = keep_nodes(
            query_starts, sequences, shared, node_tokens, parents, branch_costs, branch_tokens,
            capacity_prefix_rows, capacity_prefix_tiles, TILE_TOKENS, LIMITS, KEY_COSTS, GROUP,
            KV_HEADS, KV_ALIGN, LEAST_PREFIX, LEAST_SAVED, PROGRAMS, BLOCK_S,
        )  # fmt: skip
        is_tile = lane < tile_count
        node = tl.load(deepest + sequence, is_tile, -1)
        first = tl.where(node >= 0, tl.gather(reach, tl.maximum(node, 0), 0), first)
        prefix_row = tl.load(first_rows + sequence, is_tile, 0) + start
        is_node, of_node, leader, row, count, height = cut_nodes(
            tile_count, node_start, reach, tokens, leaders, first_rows, sequences,
            TILE_TOKENS, LIMITS, GROUP, BLOCK_S, BLOCK_T,
        )  # fmt: skip
        node = tl.where(is_node, of_node, node)
        sequence = tl.where(is_node, leader, sequence)
        start = tl.where(is_node, row, start)
        taken = tl.where(is_node, count, taken)
        first = tl.where(is_node, tl.gather(node_start, of_node, 0), first)
        end = tl.where(is_node, tl.gather(reach, of_node, 0), end)
        index = tl.where(is_node, height, index)
        tile_count += tiles
    return (
        tile_count, prefix_count, saved_ns, sequence, start, taken, first, end, index, is_node,
        node, prefix_row, node_start, reach, tokens, parent,
    )  # fmt: skip


@triton.jit
def keep_nodes(
    query_starts, sequences, shared, node_tokens, parents, branch_costs, branch_tokens,
    capacity_prefix_rows, capacity_prefix_tiles,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, KV_ALIGN: tl.constexpr, LEAST_PREFIX: tl.constexpr,
    LEAST_SAVED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """What each node reads, if all kept nodes fit into the capacity, else nothing.

    For each node the first key, the key behind the last, its query tokens and the node above; then
    the query tiles of all nodes, and the counts PREFIX_ROWS and SAVED_NS.
    """
    start, reach, tokens, parent, saved = choose_nodes(
        sequences, shared, node_tokens, parents, branch_costs, branch_tokens,
        TILE_TOKENS, LIMITS, KEY_COSTS, GROUP, KV_HEADS, KV_ALIGN, LEAST_PREFIX, LEAST_SAVED,
        BLOCK_S,
    )  # fmt: skip
    total = tl.load(query_starts + sequences)
    is_kept = reach > start
    _, tile_tokens = tile_of(tokens, TILE_TOKENS, LIMITS, GROUP)
    tiles = tl.sum(tl.where(is_kept, (tokens + tile_tokens - 1) // tile_tokens, 0))
    rows = tl.maximum(total, tl.sum(tl.where(is_kept, tokens, 0)))
    rows = tl.where(tiles > 0, rows, 0)
    fits = (tiles <= capacity_prefix_tiles) & (rows <= capacity_prefix_rows)
    reach = tl.where(fits, reach, start * 0)
    start = tl.where(fits, start, start * 0)
    prefix_count = tl.where(fits & (tiles > 0), total, 0)
    saved_ns = tl.minimum((saved >> FRACTION_BITS) * KV_HEADS // PROGRAMS, MAX_COST_NS)
    saved_ns = tl.where(fits, saved_ns, -1).to(tl.int32)
    tiles = tl.where(fits, tiles, 0).to(tl.int32)
    return start, reach, tokens, parent, tiles, prefix_count, saved_ns


@triton.jit
def cut_sequences(
    query_starts, kv_lengths, sequences,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    KV_ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of the sequences: how many there are, and their fields.

    Lanes behind the last tile have any fields, and 0 tokens.
    """
    lane = tl.arange(0, BLOCK_S)
    is_given = lane < sequences
    length = query_length(query_starts, lane, is_given)
    _, tokens = tile_of(length, TILE_TOKENS, LIMITS, GROUP)
    tiles = tl.where(length > 0, (length + tokens - 1) // tokens, 0)
    tile_ends = cumsum(tiles)
    tile_count = tl.sum(tiles)

    is_tile = tl.arange(0, BLOCK_T) < tile_count
    sequence = tl.minimum(count_at_most(tile_ends, is_given, 0, BLOCK_T), BLOCK_S - 1)
    local = tl.arange(0, BLOCK_T) - tl.gather(tile_ends - tiles, sequence, 0)
    length = query_length(query_starts, sequence, is_tile)
    before = tl.load(kv_lengths + sequence, is_tile, 0) - length
    index, tokens = tile_of(length, TILE_TOKENS, LIMITS, GROUP)
    start = local * tokens
    taken = tl.where(is_tile, tl.minimum(tokens, length - start), 0)
    first = before * 0
    if WINDOW > 0:
        first = tl.maximum(before + start - (WINDOW - 1), 0) // KV_ALIGN * KV_ALIGN
    end = before + start + taken
    return tile_count, sequence, start, taken, first, end, index


@triton.jit
def split_tiles(
    is_tile, first, end, index, is_node, node, node_start, reach, node_tokens, parent,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr, LEAST_SPLIT: tl.constexpr, PARTS: tl.constexpr, KV_ALIGN: tl.constexpr,
    LEAST_PREFIX: tl.constexpr,
):  # fmt: skip
    """Splits of each tile (0 in a lane without one), their keys, the splits before, unit costs.

    The splits before are those of the nodes that read keys before the tile's.
    """
    keys = tl.where(is_tile, end - first, 0)
    target = target_cost(is_tile, keys, index, START_COSTS, KEY_COSTS, KV_HEADS, PARTS)
    splits, split_keys = split_keys_of(
        keys, index, target, START_COSTS, KEY_COSTS, SPLIT, LEAST_SPLIT, PARTS, KV_ALIGN
    )
    splits_before = splits * 0
    if LEAST_PREFIX > 0:
        height, _ = tile_of(node_tokens, TILE_TOKENS, LIMITS, GROUP)
        of_node, _ = split_keys_of(
            reach - node_start, height, target,
            START_COSTS, KEY_COSTS, SPLIT, LEAST_SPLIT, PARTS, KV_ALIGN,
        )  # fmt: skip
        total = splits_to(of_node, parent)
        own = tl.where(is_node, splits, 0)
        splits_before = tl.gather(total, tl.maximum(node, 0), 0) - own
        splits_before = tl.where(is_tile & (node >= 0), splits_before, 0)
    return splits, split_keys, splits_before, unit_cost(index, split_keys, START_COSTS, KEY_COSTS)


CYCLIC = tl.constexpr(0)
SNAKE = tl.constexpr(1)
ONE_EACH = tl.constexpr(2)
STATE_MARK = tl.constexpr(0x6E6F7374616C6C21)
"""Last word of a state whose sums are those of builds. Other contents, such as those of memory that
was discarded and mapped anew, begin new sums."""


@triton.jit(do_not_specialize=["sequences"])
def build_kernel(
    query_starts, kv_lengths, sequences, leaders, shared, first_rows, deepest, node_tokens, parents,
    branch_costs, branch_tokens, tasks, program_offsets, reductions, counts, prefix_rows, state,
    capacity_tiles, capacity_units, capacity_reductions, capacity_rows, capacity_programs,
    capacity_prefix_rows, capacity_prefix_tiles,
    PROGRAMS: tl.constexpr, TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST_SPLIT: tl.constexpr,
    PARTS: tl.constexpr, KV_ALIGN: tl.constexpr, LEAST_PREFIX: tl.constexpr,
    LEAST_SAVED: tl.constexpr, CLASSES: tl.constexpr, DEAL: tl.constexpr, WORKERS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write the tables of a batch; the grid is max(CLASSES, 1) * WORKERS programs.

    ``LEAST_PREFIX`` 0: there is no prefix forest, and its arguments are not read. ``state``,
    int64: the queue of the attention kernel, which is emptied; sums over the builds: their number,
    those with shared prefixes, those whose prefixes exceeded the capacity, and SAVED_NS; and
    ``STATE_MARK``, without which the sums begin anew.
    """
    (
        tile_count, prefix_count, saved_ns, sequence, start, taken, first, end, index, is_node,
        node, prefix_row, node_start, reach, tokens, parent,
    ) = cut_batch(
        query_starts, kv_lengths, sequences, leaders, shared, first_rows, deepest, node_tokens,
        parents, branch_costs, branch_tokens, capacity_prefix_rows, capacity_prefix_tiles,
        TILE_TOKENS, LIMITS, KEY_COSTS, GROUP, KV_HEADS, WINDOW, KV_ALIGN, LEAST_PREFIX,
        LEAST_SAVED, PROGRAMS, BLOCK_S, BLOCK_T,
    )  # fmt: skip
    is_counted = tile_count <= capacity_tiles
    counted_tiles = tl.where(is_counted, tile_count, 0)
    lane = tl.arange(0, BLOCK_T)
    is_tile = lane < counted_tiles
    splits, split_keys, splits_before, cost = split_tiles(
        is_tile, first, end, index, is_node, node, node_start, reach, tokens, parent,
        TILE_TOKENS, LIMITS, GROUP, START_COSTS, KEY_COSTS, KV_HEADS, SPLIT, LEAST_SPLIT, PARTS,
        KV_ALIGN, LEAST_PREFIX,
    )  # fmt: skip
    tile_units = splits * KV_HEADS
    splits += splits_before
    is_reduced = (splits > 1) & (is_node.to(tl.int32) == 0)
    reduced = tl.where(is_reduced, KV_HEADS, 0)
    rows = tl.where(is_reduced, splits * KV_HEADS * taken * GROUP, 0)

    units = tl.sum(tile_units)
    fits = _write_counts(
        counts, state, tile_count, is_counted, units, tl.sum(reduced), tl.sum(rows.to(tl.int64)),
        prefix_count, saved_ns, capacity_units, capacity_reductions, capacity_rows,
        capacity_programs, PROGRAMS, DEAL,
    )  # fmt: skip
    pid = tl.program_id(0)
    units = tl.where(fits, units, 0)
    _write_offsets(pid, program_offsets, units, capacity_programs, PROGRAMS, DEAL, BLOCK_U)
    _write_tables(
        tasks, reductions, prefix_rows, pid, is_tile, lane < tl.where(fits, counted_tiles, 0), cost,
        tile_units, splits, split_keys, splits_before, rows, reduced, query_starts, sequence, start,
        taken, first, end, index, is_node, prefix_row, prefix_count, units,
        PROGRAMS, DEAL, KV_HEADS, GROUP, LEAST_PREFIX, CLASSES, WORKERS, BLOCK_T, BLOCK_U,
    )  # fmt: skip


@triton.jit
def _write_tables(
    tasks, reductions, prefix_rows, pid, is_tile, is_written, cost,
    tile_units, splits, split_keys, splits_before, rows, reduced, query_starts, sequence, start,
    taken, first, end, index, is_node, prefix_row, prefix_count, units,
    PROGRAMS: tl.constexpr, DEAL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    LEAST_PREFIX: tl.constexpr, CLASSES: tl.constexpr, WORKERS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write this program's share of the units, reductions and prefix rows."""
    mine, rank_before = _my_share(is_tile, is_written, cost, tile_units, pid // WORKERS, CLASSES)
    first_row = cumsum(rows) - rows
    _write_units(
        tasks, pid % WORKERS, mine, rank_before, units, tile_units, splits, split_keys, first_row,
        sequence, start, taken, first, end, index, is_node, splits_before,
        PROGRAMS, DEAL, KV_HEADS, GROUP, LEAST_PREFIX, WORKERS, BLOCK_T, BLOCK_U,
    )  # fmt: skip
    _write_reductions(
        reductions, pid % WORKERS, mine, reduced, splits, first_row, sequence, start, taken,
        KV_HEADS, GROUP, WORKERS,
    )  # fmt: skip
    if LEAST_PREFIX > 0:
        is_own = tl.where(is_node, 0, prefix_count) > 0
        _write_prefix_rows(
            prefix_rows, pid % WORKERS, mine & is_own, query_starts,
            prefix_row, sequence, start, taken, splits, splits_before, first_row, GROUP, WORKERS,
        )  # fmt: skip


@triton.jit
def _my_share(is_tile, mine, cost, tile_units, my_place, CLASSES: tl.constexpr):
    """The tiles of ``mine`` in a program's class of cost, and the rank of their first unit."""
    rank_before = tl.sum(tile_units) * 0
    if CLASSES > 0:
        largest = tl.max(tl.where(is_tile, cost, 0))
        place = CLASSES - 1 - cost * CLASSES // (largest + 1)
        rank_before = tl.sum(tl.where(is_tile & (place < my_place), tile_units, 0))
        mine = mine & (place == my_place)
    return mine, rank_before


@triton.jit
def _write_units(
    tasks, worker, mine, rank_before, units, tile_units, splits, split_keys, first_row,
    sequence, start, taken, first, end, index, is_node, splits_before,
    PROGRAMS: tl.constexpr, DEAL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    LEAST_PREFIX: tl.constexpr, WORKERS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write every ``WORKERS``-th block of the units of the query tiles that are ``mine``."""
    my_units = tl.where(mine, tile_units, 0)
    unit_ends = cumsum(my_units)
    my_count = tl.sum(my_units)
    every_lane = tl.arange(0, BLOCK_T) >= 0
    for block in range(worker * BLOCK_U, my_count, WORKERS * BLOCK_U):
        unit = block + tl.arange(0, BLOCK_U)
        is_unit = unit < my_count
        tile = tl.minimum(count_at_most(unit_ends, every_lane, block, BLOCK_U), BLOCK_T - 1)
        in_tile = unit - tl.gather(unit_ends - my_units, tile, 0)
        split = in_tile // KV_HEADS
        head = in_tile % KV_HEADS
        row = tasks + _place(rank_before + unit, units, PROGRAMS, DEAL) * 8
        tokens = tl.gather(taken, tile, 0)
        step = tl.gather(split_keys, tile, 0)
        low = tl.gather(first, tile, 0) + split * step
        tile_splits = tl.gather(splits, tile, 0)
        place = split
        if LEAST_PREFIX > 0:
            place += tl.gather(splits_before, tile, 0)
        partial = tl.gather(first_row, tile, 0)
        partial += (head * tile_splits + place) * tokens * GROUP
        partial = tl.where(tile_splits > 1, partial, -1)
        if LEAST_PREFIX > 0:
            partial = tl.where(tl.gather(is_node.to(tl.int32), tile, 0) > 0, -2 - place, partial)
        tl.store(row, tl.gather(sequence, tile, 0), is_unit)
        tl.store(row + 1, tl.gather(start, tile, 0), is_unit)
        tl.store(row + 2, tokens, is_unit)
        tl.store(row + 3, low, is_unit)
        tl.store(row + 4, tl.minimum(low + step, tl.gather(end, tile, 0)), is_unit)
        tl.store(row + 5, head, is_unit)
        tl.store(row + 6, tl.gather(index, tile, 0), is_unit)
        tl.store(row + 7, partial, is_unit)


@triton.jit
def _write_reductions(
    reductions, worker, mine, reduced, splits, first_row, sequence, start, taken,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """Write the reductions of every ``WORKERS``-th KV head of the query tiles that are ``mine``."""
    out = reductions + (cumsum(reduced) - reduced) * 6
    writes = mine & (reduced > 0)
    for head in range(worker, KV_HEADS, WORKERS):
        row = out + head * 6
        tl.store(row, sequence, writes)
        tl.store(row + 1, start, writes)
        tl.store(row + 2, taken, writes)
        tl.store(row + 3, start * 0 + head, writes)
        tl.store(row + 4, first_row + head * splits * taken * GROUP, writes)
        tl.store(row + 5, splits, writes)


@triton.jit
def _write_prefix_rows(
    prefix_rows, worker, writes, query_starts, prefix_row, sequence, start, taken, splits,
    splits_before, first_row,
    GROUP: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """Write the prefix rows of every ``WORKERS``-th query token of the query tiles."""
    packed = tl.load(query_starts + sequence, writes, 0) + start
    rows = taken * GROUP
    for token in range(worker, tl.max(tl.where(writes, taken, 0)), WORKERS):
        row = prefix_rows + (prefix_row + token) * 4
        is_token = writes & (token < taken)
        tl.store(row, packed + token, is_token)
        first = tl.where(splits_before > 0, first_row + token * GROUP, -1)
        tl.store(row + 1, first, is_token)
        tl.store(row + 2, rows, is_token)
        tl.store(row + 3, splits * rows, is_token)


@triton.jit
def _write_counts(
    counts, state, tile_count, is_counted, units, reductions, scratch_rows, prefix_rows, saved_ns,
    capacity_units, capacity_reductions, capacity_rows, capacity_programs,
    PROGRAMS: tl.constexpr, DEAL: tl.constexpr,
):  # fmt: skip
    """Write the counts, in the first program; whether they fit, without which no unit is written.

    If the query tiles exceed the capacity, the counts are minus their number and zeros.
    """
    programs = units if DEAL == ONE_EACH else PROGRAMS
    if tl.program_id(0) == 0:
        clamped = tl.minimum(scratch_rows, 2147483647).to(tl.int32)
        tl.store(counts, tl.where(is_counted, units, -tile_count))
        tl.store(counts + 1, tl.where(is_counted, reductions, 0))
        tl.store(counts + 2, tl.where(is_counted, clamped, 0))
        tl.store(counts + 3, tl.where(is_counted, programs, 0))
        tl.store(counts + 4, tl.where(is_counted, prefix_rows, 0))
        tl.store(counts + 5, tl.where(is_counted, saved_ns, 0))
        tl.store(state, tl.full([], 0, tl.int64))
        tl.store(state + 1, tl.full([], 0, tl.int64))
        is_known = tl.load(state + 6) == STATE_MARK
        _add_to_sum(state + 2, is_known, 1)
        _add_to_sum(state + 3, is_known, tl.where(prefix_rows > 0, 1, 0))
        _add_to_sum(state + 4, is_known, tl.where(saved_ns < 0, 1, 0))
        _add_to_sum(state + 5, is_known, tl.maximum(saved_ns, 0))
        tl.store(state + 6, tl.full([], STATE_MARK, tl.int64))
    fits = (units <= capacity_units) & (reductions <= capacity_reductions)
    return fits & (scratch_rows <= capacity_rows) & (programs <= capacity_programs)


@triton.jit
def _add_to_sum(place, is_known, value):
    """Add a value to a sum, or begin it."""
    tl.store(place, tl.where(is_known, tl.load(place), 0) + value)


@triton.jit
def _offset(program, units, PROGRAMS: tl.constexpr, DEAL: tl.constexpr):
    """First place of each program in the Task-Table."""
    rounds = units // PROGRAMS
    rest = units % PROGRAMS
    first_extra = units * 0
    if DEAL == SNAKE:
        first_extra = tl.where(rounds % 2 == 1, PROGRAMS - rest, 0)
    extra = tl.minimum(tl.maximum(program - first_extra, 0), rest)
    return program * rounds + extra


@triton.jit
def _place(rank, units, PROGRAMS: tl.constexpr, DEAL: tl.constexpr):
    """Place of each rank in the Task-Table."""
    if DEAL == ONE_EACH:
        return rank
    turn = rank // PROGRAMS
    program = rank % PROGRAMS
    if DEAL == SNAKE:
        program = tl.where(turn % 2 == 1, PROGRAMS - 1 - program, program)
    return _offset(program, units, PROGRAMS, DEAL) + turn


@triton.jit
def _write_offsets(
    pid, program_offsets, units, capacity_programs,
    PROGRAMS: tl.constexpr, DEAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write every ``num_programs``-th block of the program offsets."""
    lane = tl.arange(0, BLOCK)
    for block in range(pid * BLOCK, capacity_programs + 1, tl.num_programs(0) * BLOCK):
        program = block + lane
        if DEAL == ONE_EACH:
            offset = tl.minimum(program, units)
        else:
            offset = _offset(tl.minimum(program, PROGRAMS), units, PROGRAMS, DEAL)
        tl.store(program_offsets + program, offset, program <= capacity_programs)
