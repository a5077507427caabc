"""Cut a batch into query tiles and decide into how many units the keys of each are split.

A query tile is a tile before its keys are split: some query tokens of a sequence, and the keys that
they see. All KV heads have the same query tiles. Query tiles of kept nodes of the prefix forest
stand behind those of all sequences: some query tokens of all members, and the keys that the node
reads. The device builder computes the same integers.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.tables.costs import MAX_COST_NS
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, CutRules, tile_of, unit_cost
from nostall.serving.tables.prefix.forest import (
    DEEPEST,
    FIRST_PREFIX_ROW,
    NODE_PARENT,
    NODE_REACH,
    NODE_SPLITS,
    NODE_START,
    NODE_TOKENS,
    PACKED,
    shared_keys,
    splits_to,
)
from nostall.serving.tables.prefix.leaders import SharedPrefixes

Int32s = NDArray[np.int32]

TILE_SEQUENCE = 0
"""Sequence; of a tile of a node its leader, whose pages are read."""
TILE_START = 1
"""First query token within the sequence; of a tile of a node its first prefix row."""
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
"""1 if the tile is one of a node, else 0."""
TILE_PREFIX_ROW = 12
"""Prefix row of the first query token."""
TILE_PACKED = 13
"""Row of the first query token in the packed queries."""
TILE_BEFORE = 14
"""Splits of the nodes that read keys before it, which are added before its own."""
TILE_NODE = 15
"""Sequence that stands for the node of a tile of one."""
TILE_COLUMNS = 16


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
    forest: Int32s,
    rules: CutRules,
    tiles: Int32s,
) -> None:
    """Write the query tiles of a batch, one a row of (tiles, TILE_COLUMNS).

    ``forest`` is from :mod:`nostall.serving.tables.prefix.forest`; ``tiles`` has exactly the rows
    that :func:`count_tiles` and its ``choose_nodes`` count.
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
        shared = shared_keys(sequence, forest)
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
            row[TILE_PREFIX] = 0
            row[TILE_PREFIX_ROW] = forest[sequence, FIRST_PREFIX_ROW] + start
            row[TILE_PACKED] = forest[sequence, PACKED] + start
            total += unit_cost(index, end - first, rules)
            count += 1
    total += _cut_nodes(prefixes, forest, rules, tiles, count)
    _split_tiles(tiles, total, forest, rules)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _cut_nodes(
    prefixes: SharedPrefixes, forest: Int32s, rules: CutRules, tiles: Int32s, count: int
) -> int:
    """Write the query tiles of kept nodes from row ``count`` on; returns their cost."""
    cost = 0
    for node in range(len(prefixes.leaders)):
        start, reach = np.int64(forest[node, NODE_START]), np.int64(forest[node, NODE_REACH])
        if reach <= start:
            continue
        leader, length = prefixes.leaders[node], np.int64(forest[node, NODE_TOKENS])
        index = tile_of(length, rules)
        tokens = rules.tile_tokens[index]
        for first in range(0, length, tokens):
            row = tiles[count]
            row[TILE_SEQUENCE] = leader
            row[TILE_START] = forest[leader, FIRST_PREFIX_ROW] + first
            row[TILE_COUNT] = min(tokens, length - first)
            row[TILE_KV_START] = start
            row[TILE_KV_END] = reach
            row[TILE_INDEX] = index
            row[TILE_PREFIX] = 1
            row[TILE_NODE] = node
            cost += unit_cost(index, reach - start, rules)
            count += 1
    return cost


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _split_tiles(tiles: Int32s, total: int, forest: Int32s, rules: CutRules) -> None:
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
        if row[TILE_PREFIX]:
            # All tiles of a node have these splits.
            forest[row[TILE_NODE], NODE_SPLITS] = splits
    for row in tiles:
        if row[TILE_PREFIX]:
            row[TILE_BEFORE] = splits_to(forest[row[TILE_NODE], NODE_PARENT], forest)
        else:
            row[TILE_BEFORE] = splits_to(forest[row[TILE_SEQUENCE], DEEPEST], forest)


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
        if splits > 1 and not row[TILE_PREFIX]:
            reductions += rules.kv_heads
            rows = np.int64(row[TILE_COUNT]) * rules.group
            scratch_rows += splits * rows * rules.kv_heads
    return units, reductions, scratch_rows
