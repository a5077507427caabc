"""Cut a batch into query tiles and decide into how many units the keys of each are split.

A query tile is a tile before its keys are split: some query tokens of a sequence, and the keys that
they see. All KV heads have the same query tiles. Query tiles of prefix groups stand behind those of
all sequences: some query tokens of all members, and the keys that the members share. The device
builder computes the same integers.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.tables.costs import MAX_COST_NS
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, CutRules, tile_of, unit_cost
from nostall.serving.tables.prefixes import (
    FIRST_PREFIX_ROW,
    PACKED,
    PREFIX_TILE,
    SHARED,
    SharedPrefixes,
)

Int32s = NDArray[np.int32]

TILE_SEQUENCE = 0
"""Sequence; of a tile of a prefix group its first member, whose pages are read."""
TILE_START = 1
"""First query token within the sequence; of a tile of a prefix group its first prefix row."""
TILE_COUNT = 2
TILE_KV_START = 3
TILE_KV_END = 4
TILE_INDEX = 5
TILE_SPLITS = 6
TILE_SPLIT_KEYS = 7
TILE_COST = 8
"""Cost of one unit of the tile, in ns."""
TILE_UNITS = 9
TILE_RANK = 10
"""Rank of the tile's first unit in the order of costs."""
TILE_PREFIX = 11
"""Tile height of the prefix group of a member, :data:`NO_PREFIX`, or :data:`IS_PREFIX`."""
TILE_PREFIX_ROW = 12
"""Prefix row of a member's first query token."""
TILE_PACKED = 13
"""Row of the first query token in the packed queries."""
TILE_BEFORE = 14
"""Splits of the shared prefix, which a member adds before its own."""
TILE_COLUMNS = 15

NO_PREFIX, IS_PREFIX = -1, -2


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def count_tiles(query_lengths: Int32s, rules: CutRules) -> int:
    """Query tiles of the sequences of a batch."""
    count = 0
    for length in query_lengths:
        if length > 0:
            tokens = rules.tile_tokens[tile_of(length, rules)]
            count += (length + tokens - 1) // tokens
    return count


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def cut_tiles(
    query_lengths: Int32s,
    kv_lengths: Int32s,
    prefixes: SharedPrefixes,
    shares: Int32s,
    rules: CutRules,
    tiles: Int32s,
) -> None:
    """Write the query tiles of a batch, one a row of (tiles, TILE_COLUMNS).

    ``shares`` is from :func:`share_prefixes`; ``tiles`` has exactly the rows that
    :func:`count_tiles` and :func:`share_prefixes` count.
    """
    count = 0
    total = 0
    for sequence in range(len(query_lengths)):
        length = np.int64(query_lengths[sequence])
        if length == 0:
            continue
        index = tile_of(length, rules)
        tokens = rules.tile_tokens[index]
        before = kv_lengths[sequence] - length
        shared = shares[sequence, SHARED]
        for start in range(0, length, tokens):
            taken = min(tokens, length - start)
            first = max(shared, before + start - rules.window + 1)
            first -= first % rules.kv_align
            end = before + start + taken
            row = tiles[count]
            row[TILE_SEQUENCE] = sequence
            row[TILE_START] = start
            row[TILE_COUNT] = taken
            row[TILE_KV_START] = first
            row[TILE_KV_END] = end
            row[TILE_INDEX] = index
            row[TILE_PREFIX] = shares[sequence, PREFIX_TILE] if shared else NO_PREFIX
            row[TILE_PREFIX_ROW] = shares[sequence, FIRST_PREFIX_ROW] + start
            row[TILE_PACKED] = shares[sequence, PACKED] + start
            total += unit_cost(index, end - first, rules)
            count += 1
    total += _cut_prefixes(query_lengths, prefixes, shares, rules, tiles, count)
    _split_tiles(tiles, total, rules)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _cut_prefixes(
    query_lengths: Int32s,
    prefixes: SharedPrefixes,
    shares: Int32s,
    rules: CutRules,
    tiles: Int32s,
    count: int,
) -> int:
    """Write the query tiles of prefix groups from row ``count`` on; returns their cost."""
    cost = 0
    for group in range(len(prefixes.tokens)):
        members = prefixes.members[prefixes.starts[group] : prefixes.starts[group + 1]]
        shared = np.int64(shares[members[0], SHARED])
        if shared == 0:
            continue
        index = shares[members[0], PREFIX_TILE]
        tokens = rules.tile_tokens[index]
        length = np.int64(0)
        for sequence in members:
            length += query_lengths[sequence]
        for start in range(0, length, tokens):
            row = tiles[count]
            row[TILE_SEQUENCE] = members[0]
            row[TILE_START] = shares[members[0], FIRST_PREFIX_ROW] + start
            row[TILE_COUNT] = min(tokens, length - start)
            row[TILE_KV_START] = 0
            row[TILE_KV_END] = shared
            row[TILE_INDEX] = index
            row[TILE_PREFIX] = IS_PREFIX
            cost += unit_cost(index, shared, rules)
            count += 1
    return cost


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _split_tiles(tiles: Int32s, total: int, rules: CutRules) -> None:
    """Decide the splits, units and costs of query tiles; ``total`` is the cost of all of them."""
    target = MAX_COST_NS
    if rules.parts:
        target = max(1, (total * rules.kv_heads + rules.parts - 1) // rules.parts)
    for row in tiles:
        index, keys = row[TILE_INDEX], np.int64(row[TILE_KV_END] - row[TILE_KV_START])
        splits, split_keys = _split(index, keys, target, rules)
        row[TILE_SPLITS] = splits
        row[TILE_SPLIT_KEYS] = split_keys
        row[TILE_COST] = unit_cost(index, split_keys, rules)
        row[TILE_UNITS] = splits * rules.kv_heads
        row[TILE_BEFORE] = 0
        if row[TILE_PREFIX] >= 0:
            # All tiles of its prefix group have these splits.
            shared = np.int64(row[TILE_KV_START])
            row[TILE_BEFORE] = _split(row[TILE_PREFIX], shared, target, rules)[0]


@njit(**NO_REFERENCE_COUNTS, inline="always")  # type: ignore[untyped-decorator]
def _split(index: int, keys: int, target: int, rules: CutRules) -> tuple[int, int]:
    """Splits of so many keys, and the keys of each but the last."""
    splits = (keys + rules.split - 1) // rules.split
    if rules.parts:
        by_cost = (unit_cost(index, keys, rules) + target - 1) // target
        by_keys = (keys + rules.least_split - 1) // rules.least_split
        splits = max(splits, min(by_cost, by_keys))
    split_keys = keys
    if splits > 1:
        split_keys = (keys + splits - 1) // splits
        split_keys += (rules.kv_align - split_keys % rules.kv_align) % rules.kv_align
        splits = (keys + split_keys - 1) // split_keys
    return splits, split_keys


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def count_units(tiles: Int32s, rules: CutRules) -> tuple[int, int, int]:
    """Units, reductions and scratch rows of query tiles."""
    units = reductions = scratch_rows = 0
    for row in tiles:
        units += row[TILE_UNITS]
        splits = row[TILE_SPLITS] + row[TILE_BEFORE]
        if splits > 1 and row[TILE_PREFIX] != IS_PREFIX:
            reductions += rules.kv_heads
            rows = np.int64(row[TILE_COUNT]) * rules.group
            scratch_rows += splits * rows * rules.kv_heads
    return units, reductions, scratch_rows
