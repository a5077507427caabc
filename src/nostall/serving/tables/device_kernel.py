"""Triton kernel that builds the task tables of a batch from lengths on the device, in one launch.

Each program computes the query tiles of the whole batch, as :mod:`query_tiles` does, and writes its
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

from nostall.serving.tables.costs import FRACTION_BITS as _FRACTION_BITS
from nostall.serving.tables.costs import MAX_COST_NS as _MAX_COST_NS

FRACTION_BITS = tl.constexpr(_FRACTION_BITS)
MAX_COST_NS = tl.constexpr(_MAX_COST_NS)

CYCLIC = tl.constexpr(0)
SNAKE = tl.constexpr(1)
ONE_EACH = tl.constexpr(2)


@triton.jit
def build_kernel(
    query_starts, kv_lengths, sequences, tasks, program_offsets, reductions, counts,
    capacity_tiles, capacity_units, capacity_reductions, capacity_rows, capacity_programs,
    PROGRAMS: tl.constexpr, TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST_SPLIT: tl.constexpr,
    PARTS: tl.constexpr, KV_ALIGN: tl.constexpr, CLASSES: tl.constexpr, DEAL: tl.constexpr,
    WORKERS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write the tables of a batch; the grid is max(CLASSES, 1) * WORKERS programs."""
    tile_count, counted_tiles, sequence, start, taken, first, end, index = _cut(
        query_starts, kv_lengths, sequences, capacity_tiles,
        TILE_TOKENS, LIMITS, GROUP, WINDOW, KV_ALIGN, BLOCK_S, BLOCK_T,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK_T)
    is_tile = lane < counted_tiles
    splits, split_keys, cost = _split(
        is_tile, end - first, index,
        START_COSTS, KEY_COSTS, KV_HEADS, SPLIT, LEAST_SPLIT, PARTS, KV_ALIGN,
    )  # fmt: skip
    tile_units = splits * KV_HEADS
    reduced = tl.where(splits > 1, KV_HEADS, 0)
    rows = tl.where(splits > 1, tile_units * taken * GROUP, 0)

    # Where a count exceeds the capacity, no unit is written.
    units = tl.sum(tile_units)
    reduction_count = tl.sum(reduced)
    row_count = tl.sum(rows.to(tl.int64))
    program_count = units if DEAL == ONE_EACH else PROGRAMS
    fits = (units <= capacity_units) & (reduction_count <= capacity_reductions)
    fits = fits & (row_count <= capacity_rows) & (program_count <= capacity_programs)
    pid = tl.program_id(0)
    _write_offsets(
        pid, program_offsets, tl.where(fits, units, 0), capacity_programs, PROGRAMS, DEAL, BLOCK_U
    )
    if pid == 0:
        is_counted = tile_count <= capacity_tiles
        _write_counts(
            counts, tile_count, is_counted, units, reduction_count, row_count, program_count
        )

    mine = lane < tl.where(fits, counted_tiles, 0)
    rank_before = units * 0
    if CLASSES > 0:
        largest = tl.max(tl.where(is_tile, cost, 0))
        place = CLASSES - 1 - cost * CLASSES // (largest + 1)
        my_place = pid // WORKERS
        rank_before = tl.sum(tl.where(is_tile & (place < my_place), tile_units, 0))
        mine = mine & (place == my_place)
    first_row = _cumsum(rows) - rows
    _write_units(
        tasks, pid % WORKERS, mine, rank_before, units, tile_units, splits, split_keys, first_row,
        sequence, start, taken, first, end, index,
        PROGRAMS, DEAL, KV_HEADS, GROUP, WORKERS, BLOCK_T, BLOCK_U,
    )  # fmt: skip
    _write_reductions(
        reductions, pid % WORKERS, mine, reduced, splits, first_row, sequence, start, taken,
        KV_HEADS, GROUP, WORKERS,
    )  # fmt: skip


@triton.jit
def _cut(
    query_starts, kv_lengths, sequences, capacity_tiles,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    KV_ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of the batch, one a lane: how many there are, and their fields.

    The second result is the number of tiles, or 0 if there are more than the capacity.
    """
    lane = tl.arange(0, BLOCK_S)
    is_given = lane < sequences
    length = tl.load(query_starts + lane + 1, is_given, 0)
    length -= tl.load(query_starts + lane, is_given, 0)
    _, tokens = _tile_of(length, TILE_TOKENS, LIMITS, GROUP)
    tiles = tl.where(length > 0, (length + tokens - 1) // tokens, 0)
    tile_ends = _cumsum(tiles)
    tile_count = tl.sum(tiles)
    counted_tiles = tl.where(tile_count <= capacity_tiles, tile_count, 0)

    lane = tl.arange(0, BLOCK_T)
    is_tile = lane < counted_tiles
    sequence = tl.minimum(_count_at_most(tile_ends, is_given, 0, BLOCK_T), BLOCK_S - 1)
    local = lane - tl.gather(tile_ends - tiles, sequence, 0)
    length = tl.load(query_starts + sequence + 1, is_tile, 0)
    length -= tl.load(query_starts + sequence, is_tile, 0)
    before = tl.load(kv_lengths + sequence, is_tile, 0) - length
    index, tokens = _tile_of(length, TILE_TOKENS, LIMITS, GROUP)
    start = local * tokens
    taken = tl.where(is_tile, tl.minimum(tokens, length - start), 0)
    first = before * 0
    if WINDOW > 0:
        first = tl.maximum(before + start - (WINDOW - 1), 0) // KV_ALIGN * KV_ALIGN
    end = before + start + taken
    return tile_count, counted_tiles, sequence, start, taken, first, end, index


@triton.jit
def _split(
    is_tile, keys, index,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr, LEAST_SPLIT: tl.constexpr, PARTS: tl.constexpr, KV_ALIGN: tl.constexpr,
):  # fmt: skip
    """Splits of each query tile (0 in a lane without a tile), keys of a split, cost of a unit."""
    keys = tl.where(is_tile, keys, 0)
    splits = (keys + (SPLIT - 1)) // SPLIT
    if PARTS > 0:
        whole_cost = _cost(index, keys, START_COSTS, KEY_COSTS)
        total = tl.sum(tl.where(is_tile, whole_cost, 0).to(tl.int64)) * KV_HEADS
        target = tl.minimum(tl.maximum((total + (PARTS - 1)) // PARTS, 1), MAX_COST_NS)
        target = target.to(tl.int32)
        by_cost = (whole_cost + target - 1) // target
        by_keys = (keys + (LEAST_SPLIT - 1)) // LEAST_SPLIT
        splits = tl.maximum(splits, tl.minimum(by_cost, by_keys))
    divisor = tl.maximum(splits, 1)
    step = (keys + divisor - 1) // divisor
    step = tl.maximum((step + (KV_ALIGN - 1)) // KV_ALIGN * KV_ALIGN, 1)
    split_keys = tl.where(splits > 1, step, keys)
    splits = tl.where(splits > 1, (keys + step - 1) // step, splits)
    return splits, split_keys, _cost(index, split_keys, START_COSTS, KEY_COSTS)


@triton.jit
def _write_units(
    tasks, worker, mine, rank_before, units, tile_units, splits, split_keys, first_row,
    sequence, start, taken, first, end, index,
    PROGRAMS: tl.constexpr, DEAL: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    WORKERS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """Write every ``WORKERS``-th block of the units of the query tiles that are ``mine``."""
    my_units = tl.where(mine, tile_units, 0)
    unit_ends = _cumsum(my_units)
    my_count = tl.sum(my_units)
    every_lane = tl.arange(0, BLOCK_T) >= 0
    for block in range(worker * BLOCK_U, my_count, WORKERS * BLOCK_U):
        unit = block + tl.arange(0, BLOCK_U)
        is_unit = unit < my_count
        tile = tl.minimum(_count_at_most(unit_ends, every_lane, block, BLOCK_U), BLOCK_T - 1)
        in_tile = unit - tl.gather(unit_ends - my_units, tile, 0)
        split = in_tile // KV_HEADS
        head = in_tile % KV_HEADS
        row = tasks + _place(rank_before + unit, units, PROGRAMS, DEAL) * 8
        tokens = tl.gather(taken, tile, 0)
        step = tl.gather(split_keys, tile, 0)
        low = tl.gather(first, tile, 0) + split * step
        tile_splits = tl.gather(splits, tile, 0)
        partial = tl.gather(first_row, tile, 0) + (head * tile_splits + split) * tokens * GROUP
        tl.store(row, tl.gather(sequence, tile, 0), is_unit)
        tl.store(row + 1, tl.gather(start, tile, 0), is_unit)
        tl.store(row + 2, tokens, is_unit)
        tl.store(row + 3, low, is_unit)
        tl.store(row + 4, tl.minimum(low + step, tl.gather(end, tile, 0)), is_unit)
        tl.store(row + 5, head, is_unit)
        tl.store(row + 6, tl.gather(index, tile, 0), is_unit)
        tl.store(row + 7, tl.where(tile_splits > 1, partial, -1), is_unit)


@triton.jit
def _write_reductions(
    reductions, worker, mine, reduced, splits, first_row, sequence, start, taken,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WORKERS: tl.constexpr,
):  # fmt: skip
    """Write the reductions of every ``WORKERS``-th KV head of the query tiles that are ``mine``."""
    out = reductions + (_cumsum(reduced) - reduced) * 6
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
def _write_counts(counts, tile_count, is_counted, units, reductions, scratch_rows, programs):
    """Write the counts; if the query tiles exceed the capacity, minus their number and zeros."""
    clamped = tl.minimum(scratch_rows, 2147483647).to(tl.int32)
    tl.store(counts, tl.where(is_counted, units, -tile_count))
    tl.store(counts + 1, tl.where(is_counted, reductions, 0))
    tl.store(counts + 2, tl.where(is_counted, clamped, 0))
    tl.store(counts + 3, tl.where(is_counted, programs, 0))


@triton.jit
def _cumsum(values):
    """Inclusive sums; the cast keeps 32 bits in the interpreter."""
    return tl.cumsum(values, 0).to(tl.int32)


@triton.jit
def _count_at_most(ends, mask, base, BLOCK: tl.constexpr):
    """For each i in [0, BLOCK) the number of ``ends`` that are at most ``base + i``."""
    bins = tl.maximum(ends - base, 0)
    inside = mask & (bins < BLOCK)
    return _cumsum(tl.histogram(tl.minimum(bins, BLOCK - 1), BLOCK, mask=inside))


@triton.jit
def _tile_of(length, TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr):
    """Index of the tile height of each query length, and the query tokens of the tile."""
    last: tl.constexpr = len(LIMITS) - 1
    index = length * 0 + last
    tokens = length * 0 + TILE_TOKENS[last]
    for height in tl.static_range(last - 1, -1, -1):
        if TILE_TOKENS[height] > 0:
            takes = length * GROUP <= LIMITS[height]
            index = tl.where(takes, height, index)
            tokens = tl.where(takes, TILE_TOKENS[height], tokens)
    return index, tokens


@triton.jit
def _cost(index, keys, START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr):
    """Cost of units in ns."""
    start = index.to(tl.int64) * 0 + START_COSTS[0]
    for_key = index.to(tl.int64) * 0 + KEY_COSTS[0]
    for height in tl.static_range(1, len(START_COSTS)):
        start = tl.where(index == height, START_COSTS[height], start)
        for_key = tl.where(index == height, KEY_COSTS[height], for_key)
    scaled = (start + for_key * keys) >> FRACTION_BITS
    return tl.minimum(tl.maximum(scaled, 1), MAX_COST_NS).to(tl.int32)


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
