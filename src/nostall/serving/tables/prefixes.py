"""Prefix groups as arrays, and the choice of the groups whose prefix is read once.

A group pays if its query tokens, taken together, need tiles that cost less for each key than the
tiles of its members, by more than the partial results cost that this adds, and if it saves each
program ``TileSet.least_saved_ns``. Decodes and short verifies gain; prefills fill their tiles
already and do not. The device builder computes the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.costs import FRACTION_BITS
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, CutRules, cut_rules, tile_of
from nostall.serving.tables.settings import TableSettings

Int32s = NDArray[np.int32]

SHARED = 0
"""Keys of a sequence that are read with its group; 0: it is read alone."""
FIRST_PREFIX_ROW = 1
"""Row of ``prefix_rows`` of the sequence's first query token."""
PREFIX_TILE = 2
"""Index of the tile height of its group."""
PACKED = 3
"""Row of its first query token in the packed queries."""
SHARE_COLUMNS = 4
PARTIAL_KEYS = 4
"""Keys whose reading takes as long as the partial results that a query token adds, for each query
head of its group: two fp32 partial results, each written and read, are 16 bytes for each dimension,
and a key with its value is 4 (bf16)."""


class SharedPrefixes(NamedTuple):
    """The prefix groups of a batch as int32 arrays."""

    members: Int32s
    """Sequences of all groups, group after group."""
    starts: Int32s
    """First entry in ``members`` of each group, and the total, shape (groups + 1,)."""
    tokens: Int32s
    """Shared tokens of each group."""
    places: Int32s
    """Entry in ``members`` of each sequence, or -1, shape (sequences,)."""

    @staticmethod
    def of(groups: Sequence[PrefixGroup], sequences: int) -> SharedPrefixes:
        """The arrays of checked groups (:func:`nostall.serving.batch.checks.check_batch`)."""
        members = [sequence for group in groups for sequence in group.sequences]
        places = np.full(sequences, -1, np.int32)
        places[members] = np.arange(len(members))
        starts = np.cumsum([0, *(len(group.sequences) for group in groups)])
        return SharedPrefixes(
            np.array(members, np.int32),
            starts.astype(np.int32),
            np.array([group.tokens for group in groups], np.int32),
            places,
        )


NO_PREFIXES = SharedPrefixes.of((), 0)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def share_prefixes(
    query_lengths: Int32s, prefixes: SharedPrefixes, rules: CutRules, shares: Int32s
) -> tuple[int, int]:
    """Write what each sequence shares, (sequences, SHARE_COLUMNS); returns tiles and prefix rows.

    These are the query tiles of all groups that pay, and their query tokens.
    """
    packed = 0
    for sequence in range(len(query_lengths)):
        shares[sequence, SHARED] = 0
        shares[sequence, PACKED] = packed
        packed += query_lengths[sequence]
    tiles = rows = 0
    for group in range(len(prefixes.tokens)):
        members = prefixes.members[prefixes.starts[group] : prefixes.starts[group + 1]]
        shared = shared_keys(prefixes.tokens[group], rules)
        total, index, count, saved = _saving(query_lengths, members, shared, rules)
        if shared == 0 or saved <= PARTIAL_KEYS * rules.group * total * rules.costs[1, 0]:
            continue
        if saved * rules.kv_heads < rules.least_saved:
            continue
        tiles += count
        for sequence in members:
            shares[sequence, SHARED] = shared
            shares[sequence, FIRST_PREFIX_ROW] = rows
            shares[sequence, PREFIX_TILE] = index
            rows += query_lengths[sequence]
    return tiles, rows


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _saving(
    query_lengths: Int32s, members: Int32s, shared: int, rules: CutRules
) -> tuple[int, int, int, int]:
    """Query tokens of a group, the index and number of its tiles, and what they save.

    The latter is the cost of so many shared keys for the tiles of the members, less that for the
    tiles of the group, of one KV head in 1/256 ns.
    """
    total = 0
    apart = np.int64(0)
    for sequence in members:
        length = np.int64(query_lengths[sequence])
        index = tile_of(length, rules)
        count = (length + rules.tile_tokens[index] - 1) // rules.tile_tokens[index]
        apart += count * rules.costs[1, index]
        total += int(length)
    index = tile_of(total, rules)
    count = (total + rules.tile_tokens[index] - 1) // rules.tile_tokens[index]
    return total, index, count, (apart - count * rules.costs[1, index]) * shared


def saved_ns(query_lengths: Int32s, group: PrefixGroup, settings: TableSettings) -> float:
    """Time of each program that reading a group's prefix once saves, by the costs of units.

    ``TileSet.least_saved_ns`` is compared with it. 0 for too few shared keys.
    """
    rules = cut_rules(settings)
    members = np.array(group.sequences, np.int32)
    saved = _saving(query_lengths, members, shared_keys(group.tokens, rules), rules)[3]
    return int(saved) * rules.kv_heads / (settings.programs << FRACTION_BITS)


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def shared_keys(tokens: int, rules: CutRules) -> int:
    """Keys of a group that are read once: whole steps of ``kv_align``, or 0 if they are too few."""
    keys = tokens // rules.kv_align * rules.kv_align
    return keys if rules.least_prefix > 0 and keys >= rules.least_prefix else 0
