"""The choice of nodes on the device, one sequence a lane, and how their tiles are cut (Triton).

The integers are those of :mod:`nostall.serving.tables.prefix.forest`. A lane holds the node for
which its sequence stands; lanes that stand for none have 0 tokens.
"""
# ruff: noqa: N803 (Triton's constants are upper case)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from nostall.serving.tables.device_lanes import by_height, count_at_most, cumsum, tile_of
from nostall.serving.tables.prefix.forest import PARTIAL_KEYS as _PARTIAL_KEYS

PARTIAL_KEYS = tl.constexpr(_PARTIAL_KEYS)


@triton.jit
def key_cost(
    tokens, TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Cost of one key for the tiles of so many query tokens, in 1/256 ns."""
    index, taken = tile_of(tokens, TILE_TOKENS, LIMITS, GROUP)
    return ((tokens + taken - 1) // taken).to(tl.int64) * by_height(index, KEY_COSTS)


@triton.jit
def choose_nodes(
    sequences, shared, node_tokens, parents, branch_costs, branch_tokens,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, KEY_COSTS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, KV_ALIGN: tl.constexpr, LEAST_PREFIX: tl.constexpr,
    LEAST_SAVED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The first key and the key behind the last that each node reads (equal if it is folded), its
    query tokens, the node above, and what the kept nodes save, of one KV head in 1/256 ns."""
    lane = tl.arange(0, BLOCK_S)
    is_given = lane < sequences
    tokens = tl.load(node_tokens + lane, is_given, 0)
    parent = tl.load(parents + lane, is_given, -1)
    rest = tokens - tl.load(branch_tokens + lane, is_given, 0)
    gain = tl.load(branch_costs + lane, is_given, 0)
    gain += key_cost(rest, TILE_TOKENS, LIMITS, KEY_COSTS, GROUP)
    gain -= key_cost(tokens, TILE_TOKENS, LIMITS, KEY_COSTS, GROUP)
    least = tokens.to(tl.int64) * (PARTIAL_KEYS * GROUP * KEY_COSTS[0])
    end = tl.load(shared + lane, is_given, 0) // KV_ALIGN * KV_ALIGN
    start = lane * 0
    reach = start
    is_changed = tl.max(tokens) > 0
    while is_changed:
        start = tl.where(parent >= 0, tl.gather(reach, tl.maximum(parent, 0), 0), 0)
        keys = end - start
        saved = gain * keys
        pays = (tokens > 0) & (keys >= LEAST_PREFIX) & (saved > least)
        pays = pays & (saved * KV_HEADS >= LEAST_SAVED)
        following = tl.where(tokens > 0, tl.where(pays, end, start), 0)
        is_changed = tl.max((following != reach).to(tl.int32)) > 0
        reach = following
    start = tl.where(tokens > 0, start, 0)
    total_saved = tl.sum(tl.where(reach > start, gain * (reach - start), 0))
    return start, reach, tokens, parent, total_saved


@triton.jit
def cut_nodes(
    own_tiles, start, reach, tokens, leaders, first_rows, sequences,
    TILE_TOKENS: tl.constexpr, LIMITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The query tiles of kept nodes, in the lanes from ``own_tiles`` on: whether a lane has one,
    its node and its fields."""
    is_kept = reach > start
    index, taken = tile_of(tokens, TILE_TOKENS, LIMITS, GROUP)
    tiles = tl.where(is_kept, (tokens + taken - 1) // taken, 0).to(tl.int32)
    tile_ends = cumsum(tiles)
    every = tl.arange(0, BLOCK_S) < sequences
    node = tl.minimum(count_at_most(tile_ends, every, -own_tiles, BLOCK_T), BLOCK_S - 1)
    lane = tl.arange(0, BLOCK_T)
    is_node = (lane >= own_tiles) & (lane < own_tiles + tl.sum(tiles))
    height = tl.gather(index, node, 0)
    count = tl.gather(taken.to(tl.int32), node, 0)
    first = (lane - own_tiles - tl.gather(tile_ends - tiles, node, 0)) * count
    count = tl.minimum(count, tl.gather(tokens, node, 0) - first)
    leader = tl.load(leaders + node, is_node, 0)
    first += tl.load(first_rows + leader, is_node, 0)
    return is_node, node, leader, first, count, height


@triton.jit
def splits_to(splits, parent):
    """Splits of each node and of all nodes above it."""
    total = splits
    is_changed = tl.max(splits) > 0
    while is_changed:
        above = tl.where(parent >= 0, tl.gather(total, tl.maximum(parent, 0), 0), 0)
        following = splits + above
        is_changed = tl.max((following != total).to(tl.int32)) > 0
        total = following
    return total
