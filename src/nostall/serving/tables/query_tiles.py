"""Cut a batch into query tiles and decide into how many units the keys of each are split.

A query tile is a tile before its keys are split: some query tokens of a sequence, and the keys that
they see. All KV heads have the same query tiles. The device builder computes the same integers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.tables.costs import FRACTION_BITS, MAX_COST_NS
from nostall.serving.tables.settings import TableSettings

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NO_REFERENCE_COUNTS = {"cache": True, "_nrt": False}
"""Options of functions that allocate nothing: numba then counts no references to array rows."""
NO_WINDOW = 1 << 40
"""Window of a batch without a sliding window."""

TILE_SEQUENCE = 0
TILE_START = 1
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
TILE_COLUMNS = 11


class CutRules(NamedTuple):
    """The settings as integers, for compiled code."""

    tile_tokens: Int64s
    """Query tokens of each tile height; 0 if the group does not fit into it."""
    limits: Int64s
    """Rows of a sequence up to which each tile is taken."""
    costs: Int64s
    """Start and key times in 1/256 ns, shape (2, heights)."""
    group: int
    kv_heads: int
    window: int
    split: int
    least_split: int
    parts: int
    """Units into which the costs are split evenly at least; 0: splits do not depend on costs."""
    kv_align: int


def cut_rules(settings: TableSettings) -> CutRules:
    """The rules of the settings."""
    tiles = settings.tiles
    return CutRules(
        np.array(tiles.tile_tokens(settings.group), np.int64),
        np.array(tiles.limits, np.int64),
        settings.unit_costs.fixed_point(),
        settings.group,
        settings.kv_heads,
        settings.window or NO_WINDOW,
        tiles.split,
        tiles.least_split,
        settings.programs * tiles.units_per_program,
        tiles.kv_align,
    )


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def count_tiles(query_lengths: Int32s, rules: CutRules) -> int:
    """Query tiles of a batch."""
    count = 0
    for length in query_lengths:
        if length > 0:
            tokens = rules.tile_tokens[_tile_of(length, rules)]
            count += (length + tokens - 1) // tokens
    return count


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def cut_tiles(query_lengths: Int32s, kv_lengths: Int32s, rules: CutRules, tiles: Int32s) -> int:
    """Write the query tiles of a batch, one a row of (tiles, TILE_COLUMNS); returns how many.

    ``tiles`` has :func:`count_tiles` rows or more.
    """
    count = 0
    total = 0
    for sequence in range(len(query_lengths)):
        length = np.int64(query_lengths[sequence])
        if length == 0:
            continue
        index = _tile_of(length, rules)
        tokens = rules.tile_tokens[index]
        before = kv_lengths[sequence] - length
        for start in range(0, length, tokens):
            taken = min(tokens, length - start)
            first = max(0, before + start - rules.window + 1)
            first -= first % rules.kv_align
            end = before + start + taken
            row = tiles[count]
            row[TILE_SEQUENCE] = sequence
            row[TILE_START] = start
            row[TILE_COUNT] = taken
            row[TILE_KV_START] = first
            row[TILE_KV_END] = end
            row[TILE_INDEX] = index
            total += _cost(index, end - first, rules)
            count += 1
    _split_tiles(tiles[:count], total, rules)
    return count


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _split_tiles(tiles: Int32s, total: int, rules: CutRules) -> None:
    """Decide the splits, units and costs of query tiles; ``total`` is the cost of all of them."""
    target = MAX_COST_NS
    if rules.parts:
        target = max(1, (total * rules.kv_heads + rules.parts - 1) // rules.parts)
    for row in tiles:
        index, keys = row[TILE_INDEX], np.int64(row[TILE_KV_END] - row[TILE_KV_START])
        splits = (keys + rules.split - 1) // rules.split
        if rules.parts:
            by_cost = (_cost(index, keys, rules) + target - 1) // target
            by_keys = (keys + rules.least_split - 1) // rules.least_split
            splits = max(splits, min(by_cost, by_keys))
        split_keys = keys
        if splits > 1:
            split_keys = (keys + splits - 1) // splits
            split_keys += (rules.kv_align - split_keys % rules.kv_align) % rules.kv_align
            splits = (keys + split_keys - 1) // split_keys
        row[TILE_SPLITS] = splits
        row[TILE_SPLIT_KEYS] = split_keys
        row[TILE_COST] = _cost(index, split_keys, rules)
        row[TILE_UNITS] = splits * rules.kv_heads


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def count_units(tiles: Int32s, group: int) -> tuple[int, int, int]:
    """Units, reductions and scratch rows of query tiles."""
    units = reductions = scratch_rows = 0
    for row in tiles:
        units += row[TILE_UNITS]
        if row[TILE_SPLITS] > 1:
            reductions += row[TILE_UNITS] // row[TILE_SPLITS]
            scratch_rows += np.int64(row[TILE_UNITS]) * row[TILE_COUNT] * group
    return units, reductions, scratch_rows


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _tile_of(length: int, rules: CutRules) -> int:
    rows = length * rules.group
    last = len(rules.limits) - 1
    for index in range(last):
        if rules.tile_tokens[index] > 0 and rows <= rules.limits[index]:
            return index
    return last


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _cost(index: int, keys: int, rules: CutRules) -> int:
    scaled: int = (rules.costs[0, index] + rules.costs[1, index] * keys) >> FRACTION_BITS
    return min(max(scaled, 1), MAX_COST_NS)
