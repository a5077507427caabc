"""Sums, searches and costs over lanes that the device builder's kernels share (Triton).

The integers are those of :mod:`nostall.serving.tables.query_tiles`.
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
