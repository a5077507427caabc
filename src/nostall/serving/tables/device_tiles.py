"""The query tiles of a batch on the device, one a lane: how they are cut and split (Triton).

The integers are those of :mod:`nostall.serving.tables.query_tiles`.
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
