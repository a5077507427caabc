"""The query tiles of a batch on the device, one a lane: how they are cut and split (Triton).

The integers are those of :mod:`nostall.serving.tables.query_tiles` and
:mod:`nostall.serving.tables.prefixes`.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nostall.serving.tables.costs import FRACTION_BITS as _FRACTION_BITS
from nostall.serving.tables.costs import MAX_COST_NS as _MAX_COST_NS
from nostall.serving.tables.prefixes import PARTIAL_KEYS as _PARTIAL_KEYS

FRACTION_BITS = tl.constexpr(_FRACTION_BITS)
MAX_COST_NS = tl.constexpr(_MAX_COST_NS)
PARTIAL_KEYS = tl.constexpr(_PARTIAL_KEYS)


@triton.jit
def cut_batch(
    query_starts, kv_lengths, sequences, members, member_starts, shared_tokens, places, groups,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, KV_ALIGN: tl.constexpr,
    LEAST_PREFIX: tl.constexpr, LEAST_SAVED: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of a batch: how many tiles and prefix rows there are, and the tiles' fields.

    The last three fields: whether the tile is one of a prefix group; of a member's tile its first
    prefix row, and the tile height of its group.
    """
    tile_count, sequence, start, taken, first, end, index = cut_sequences(
        query_starts, kv_lengths, sequences,
        TILE_TOKENS, LIMITS, GROUP, WINDOW, KV_ALIGN, BLOCK_S, BLOCK_T,
    )  # fmt: skip
    lane = tl.arange(0, BLOCK_T)
    is_prefix = lane < 0
    prefix_row = lane * 0
    prefix_index = lane * 0
    prefix_count = tile_count * 0
    if LEAST_PREFIX > 0:
        shared, total, first_row, tiles, height, group, member_row = share_prefixes(
            query_starts, members, member_starts, shared_tokens, groups,
            TILE_TOKENS, LIMITS, KEY_COSTS, GROUP, KV_HEADS, KV_ALIGN, LEAST_PREFIX, LEAST_SAVED,
            BLOCK_S,
        )  # fmt: skip
        place = tl.load(places + sequence, lane < tile_count, -1)
        my_group = tl.gather(group, tl.maximum(place, 0), 0)
        first = tl.where(place >= 0, tl.gather(shared, my_group, 0), 0)
        prefix_row = tl.gather(member_row, tl.maximum(place, 0), 0) + start
        prefix_index = tl.gather(height, my_group, 0)
        is_prefix, of_group, group_start, group_taken, group_end, group_index = cut_prefixes(
            tile_count, members, member_starts, groups, shared, total, first_row, tiles, height,
            TILE_TOKENS, BLOCK_S, BLOCK_T,
        )  # fmt: skip
        sequence = tl.where(is_prefix, of_group, sequence)
        start = tl.where(is_prefix, group_start, start)
        taken = tl.where(is_prefix, group_taken, taken)
        first = tl.where(is_prefix, 0, first)
        end = tl.where(is_prefix, group_end, end)
        index = tl.where(is_prefix, group_index, index)
        prefix_count = tl.sum(tl.where(shared > 0, total, 0))
        tile_count += tl.sum(tiles)
    return (
        tile_count, prefix_count, sequence, start, taken, first, end, index, is_prefix, prefix_row,
        prefix_index,
    )  # fmt: skip


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
def share_prefixes(
    query_starts, members, member_starts, shared_tokens, groups,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, KV_ALIGN: tl.constexpr, LEAST_PREFIX: tl.constexpr,
    LEAST_SAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What prefix groups share, one a lane, and where their members stand, one a lane.

    For each group: shared keys (0 if it does not pay), its query tokens, first prefix row, tiles,
    and the index of their height. For each member: its group and its first prefix row.
    """
    lane = tl.arange(0, BLOCK)
    is_member = lane < tl.load(member_starts + groups)
    sequence = tl.load(members + lane, is_member, 0)
    length = query_length(query_starts, sequence, is_member)
    index, tokens = tile_of(length, TILE_TOKENS, LIMITS, GROUP)
    key_cost = by_height(index, KEY_COSTS)
    token_ends = cumsum(length)
    cost_ends = tl.cumsum((length + tokens - 1) // tokens * key_cost, 0)

    is_group = lane < groups
    begin = tl.load(member_starts + lane, is_group, 0)
    end = tl.load(member_starts + lane + 1, is_group, 0)
    tokens_before = sum_before(token_ends, begin)
    total = sum_before(token_ends, end) - tokens_before
    apart = sum_before(cost_ends, end) - sum_before(cost_ends, begin)
    shared = tl.load(shared_tokens + lane, is_group, 0) // KV_ALIGN * KV_ALIGN
    shared = tl.where(shared >= LEAST_PREFIX, shared, 0)
    index, tokens = tile_of(total, TILE_TOKENS, LIMITS, GROUP)
    tiles = (total + tokens - 1) // tokens
    saved = (apart - tiles * by_height(index, KEY_COSTS)) * shared
    least = total.to(tl.int64) * (PARTIAL_KEYS * GROUP * KEY_COSTS[0])
    pays = is_group & (shared > 0) & (saved > least) & (saved * KV_HEADS >= LEAST_SAVED)
    shared = tl.where(pays, shared, 0)
    tiles = tl.where(pays, tiles, 0)
    rows = tl.where(pays, total, 0)
    first_row = cumsum(rows) - rows

    group = tl.minimum(count_at_most(end, is_group, 0, BLOCK), BLOCK - 1)
    member_row = token_ends - length - tl.gather(tokens_before, group, 0)
    member_row += tl.gather(first_row, group, 0)
    return shared, total, first_row, tiles, index, group, member_row


@triton.jit
def cut_prefixes(
    own_tiles, members, member_starts, groups, shared, total, first_row, tiles, index,
    TILE_TOKENS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of prefix groups, in the lanes from ``own_tiles`` on, and their fields.

    The arguments from ``shared`` on are those of :func:`share_prefixes`.
    """
    is_group = tl.arange(0, BLOCK_S) < groups
    tile_ends = cumsum(tiles)
    group = count_at_most(tile_ends, is_group, -own_tiles, BLOCK_T)
    group = tl.minimum(group, BLOCK_S - 1)
    lane = tl.arange(0, BLOCK_T)
    is_prefix = (lane >= own_tiles) & (lane < own_tiles + tl.sum(tiles))
    height = tl.gather(index, group, 0)
    tokens = by_height(height, TILE_TOKENS).to(tl.int32)
    start = (lane - own_tiles - tl.gather(tile_ends - tiles, group, 0)) * tokens
    taken = tl.minimum(tokens, tl.gather(total, group, 0) - start)
    member = tl.load(member_starts + group, is_prefix, 0)
    sequence = tl.load(members + member, is_prefix, 0)
    start += tl.gather(first_row, group, 0)
    return is_prefix, sequence, start, taken, tl.gather(shared, group, 0), height


@triton.jit
def split_tiles(
    is_tile, first, end, index, prefix_index,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, KV_HEADS: tl.constexpr,
    SPLIT: tl.constexpr, LEAST_SPLIT: tl.constexpr, PARTS: tl.constexpr, KV_ALIGN: tl.constexpr,
    LEAST_PREFIX: tl.constexpr,
):  # fmt: skip
    """Splits of each tile (0 in a lane without one), their keys, the splits before, unit costs.

    The splits before are those of the prefix that a member's tile shares.
    """
    keys = tl.where(is_tile, end - first, 0)
    target = target_cost(is_tile, keys, index, START_COSTS, KEY_COSTS, KV_HEADS, PARTS)
    splits, split_keys = split_keys_of(
        keys, index, target, START_COSTS, KEY_COSTS, SPLIT, LEAST_SPLIT, PARTS, KV_ALIGN
    )
    splits_before = splits * 0
    if LEAST_PREFIX > 0:
        splits_before, _ = split_keys_of(
            tl.where(is_tile, first, 0), prefix_index, target,
            START_COSTS, KEY_COSTS, SPLIT, LEAST_SPLIT, PARTS, KV_ALIGN,
        )  # fmt: skip
    return splits, split_keys, splits_before, unit_cost(index, split_keys, START_COSTS, KEY_COSTS)


@triton.jit
def target_cost(
    is_tile, keys, index,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Cost of a unit if the costs of all tiles are split evenly; the largest cost without PARTS."""
    if PARTS > 0:
        cost = unit_cost(index, keys, START_COSTS, KEY_COSTS)
        total = tl.sum(tl.where(is_tile, cost, 0).to(tl.int64)) * KV_HEADS
        target = tl.minimum(tl.maximum((total + (PARTS - 1)) // PARTS, 1), MAX_COST_NS)
        return target.to(tl.int32)
    return tl.full([], MAX_COST_NS, tl.int32)


@triton.jit
def split_keys_of(
    keys, index, target,
    START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr, SPLIT: tl.constexpr,
    LEAST_SPLIT: tl.constexpr, PARTS: tl.constexpr, KV_ALIGN: tl.constexpr,
):  # fmt: skip
    """Splits of so many keys (0 of none), and the keys of each but the last."""
    splits = (keys + (SPLIT - 1)) // SPLIT
    if PARTS > 0:
        by_cost = (unit_cost(index, keys, START_COSTS, KEY_COSTS) + target - 1) // target
        by_keys = (keys + (LEAST_SPLIT - 1)) // LEAST_SPLIT
        splits = tl.maximum(splits, tl.minimum(by_cost, by_keys))
    divisor = tl.maximum(splits, 1)
    step = (keys + divisor - 1) // divisor
    step = tl.maximum((step + (KV_ALIGN - 1)) // KV_ALIGN * KV_ALIGN, 1)
    split_keys = tl.where(splits > 1, step, keys)
    splits = tl.where(splits > 1, (keys + step - 1) // step, splits)
    return splits, split_keys


@triton.jit
def query_length(query_starts, sequence, mask):
    """Query tokens of sequences."""
    return tl.load(query_starts + sequence + 1, mask, 0) - tl.load(query_starts + sequence, mask, 0)


@triton.jit
def sum_before(ends, place):
    """Sum of the entries before each place; ``ends`` are inclusive sums."""
    return tl.where(place > 0, tl.gather(ends, tl.maximum(place - 1, 0), 0), 0)


@triton.jit
def by_height(index, VALUES: tl.constexpr):
    """The value of each tile height, in 64 bits."""
    value = index.to(tl.int64) * 0 + VALUES[0]
    for height in tl.static_range(1, len(VALUES)):
        value = tl.where(index == height, VALUES[height], value)
    return value


@triton.jit
def cumsum(values):
    """Inclusive sums; the cast keeps 32 bits in the interpreter."""
    return tl.cumsum(values, 0).to(tl.int32)


@triton.jit
def count_at_most(ends, mask, base, BLOCK: tl.constexpr):
    """For each i in [0, BLOCK) the number of ``ends`` that are at most ``base + i``."""
    bins = tl.maximum(ends - base, 0)
    inside = mask & (bins < BLOCK)
    return cumsum(tl.histogram(tl.minimum(bins, BLOCK - 1), BLOCK, mask=inside))


@triton.jit
def tile_of(length, TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr):
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
def unit_cost(index, keys, START_COSTS: tl.constexpr, KEY_COSTS: tl.constexpr):
    """Cost of units in ns."""
    start, for_key = by_height(index, START_COSTS), by_height(index, KEY_COSTS)
    scaled = (start + for_key * keys) >> FRACTION_BITS
    return tl.minimum(tl.maximum(scaled, 1), MAX_COST_NS).to(tl.int32)
