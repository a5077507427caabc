"""The prefix tree of a batch as a forest of nodes, and the choice of nodes that are read once.

A *node* is a number of sequences that share more tokens with each other than with all others; the
first sequence whose (leader, tokens) is the node's stands for it. Its *branches* are the members
that share more among themselves, and the members that share no more with anybody.

Sequences are arranged in the preorder of the tree (a leader, then those that share with it, the
deepest first), so that the query tokens of each node are contiguous.

A node that is *kept* is read once for its members, from the end of the nearest kept node above it
to its own end. It pays if its query tokens, taken together, need tiles that cost less for each key
than the tiles of its branches, by more than the partial results cost that this adds, and if it
saves each program ``TileSet.least_saved_ns``. A node that does not pay is folded: its branches read
its keys, as parts of their own nodes if these pay. Decodes and short verifies gain; prefills fill
their tiles already and do not. The device builder computes the same integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, CutRules, tile_of
from nostall.serving.tables.prefix.leaders import SharedPrefixes

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

PACKED = 0
"""Row of the sequence's first query token in the packed queries."""
FIRST_PREFIX_ROW = 1
"""Row of its first query token in ``prefix_rows``: query tokens before it in preorder."""
SUBTREE = 2
"""Query tokens of the sequence and of all that have it as leader, directly or not."""
OWN_NODE = 3
"""Sequence that stands for the node of its leader and shared tokens, or -1."""
DEEPEST = 4
"""Sequence that stands for the deepest node that the sequence is in, or -1."""
NODE_TOKENS = 5
"""Query tokens of the node for which the sequence stands; 0: it stands for none."""
NODE_PARENT = 6
"""Sequence that stands for the node above, or -1."""
NODE_START = 7
"""First key that the node reads."""
NODE_REACH = 8
"""Key behind the last that it reads; equal to NODE_START if it is folded."""
NODE_SPLITS = 9
"""Splits of its keys; 0 if it is folded."""
FOREST_COLUMNS = 10
PARTIAL_KEYS = 4
"""Keys whose reading takes as long as the partial results that a query token adds, for each query
head of its group: two fp32 partial results, each written and read, are 16 bytes for each dimension,
and a key with its value is 4 (bf16)."""


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def arrange(query_lengths: Int32s, prefixes: SharedPrefixes, forest: Int32s) -> None:
    """Write the forest of a batch, (sequences, FOREST_COLUMNS), with all nodes folded."""
    packed = 0
    for sequence in range(len(query_lengths)):
        row = forest[sequence]
        row[:] = 0
        row[OWN_NODE] = row[DEEPEST] = row[NODE_PARENT] = -1
        row[PACKED] = packed
        row[SUBTREE] = query_lengths[sequence]
        packed += query_lengths[sequence]
    for sequence in range(len(prefixes.leaders) - 1, -1, -1):
        if prefixes.leaders[sequence] >= 0:
            forest[prefixes.leaders[sequence], SUBTREE] += forest[sequence, SUBTREE]
    roots = 0
    for sequence in range(len(prefixes.leaders)):
        if prefixes.leaders[sequence] < 0:
            forest[sequence, FIRST_PREFIX_ROW] = roots
            roots += forest[sequence, SUBTREE]
        else:
            _arrange_member(sequence, query_lengths, prefixes, forest)
    for sequence in range(len(prefixes.leaders)):
        leader, deepest = prefixes.leaders[sequence], forest[sequence, DEEPEST]
        if leader >= 0 and (
            forest[leader, DEEPEST] < 0
            or prefixes.tokens[forest[leader, DEEPEST]] < prefixes.tokens[sequence]
        ):
            forest[leader, DEEPEST] = forest[sequence, OWN_NODE]
        if deepest < 0:
            forest[sequence, DEEPEST] = forest[sequence, OWN_NODE]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _arrange_member(
    sequence: int, query_lengths: Int32s, prefixes: SharedPrefixes, forest: Int32s
) -> None:
    """Write the place and the node of a sequence whose leader has been arranged."""
    leader, tokens = prefixes.leaders[sequence], prefixes.tokens[sequence]
    place = forest[leader, FIRST_PREFIX_ROW] + query_lengths[leader]
    total = query_lengths[leader]
    node, above = sequence, -1
    for other in range(len(prefixes.leaders)):
        if prefixes.leaders[other] != leader:
            continue
        shared = prefixes.tokens[other]
        if shared > tokens or (shared == tokens and other < sequence):
            place += forest[other, SUBTREE]
        if shared >= tokens:
            total += forest[other, SUBTREE]
        if shared == tokens:
            node = min(node, other)
        elif shared < tokens and (above < 0 or shared > prefixes.tokens[above]):
            above = other
    row = forest[sequence]
    row[FIRST_PREFIX_ROW] = place
    row[OWN_NODE] = node
    row[NODE_TOKENS] = total if node == sequence else 0
    row[NODE_PARENT] = above if above >= 0 else forest[leader, OWN_NODE]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def choose_nodes(
    prefixes: SharedPrefixes, rules: CutRules, forest: Int32s, gains: Int64s
) -> tuple[int, int, int]:
    """Decide which nodes are kept; returns their query tiles, their query tokens, what they save.

    The latter is the cost of one KV head in 1/256 ns. ``gains`` is overwritten, (sequences,).
    """
    nodes = len(prefixes.leaders) if rules.least_prefix > 0 else 0
    for node in range(nodes):
        gains[node] = gain_of(node, prefixes, rules, forest)
        if forest[node, NODE_TOKENS]:
            forest[node, NODE_START] = -1  # No start of a node, so that the first pass visits it.
    is_changed = nodes > 0
    while is_changed:
        is_changed = False
        for node in range(nodes):
            row = forest[node]
            start = forest[row[NODE_PARENT], NODE_REACH] if row[NODE_PARENT] >= 0 else 0
            if row[NODE_TOKENS] == 0 or row[NODE_START] == start:
                continue
            end = prefixes.tokens[node] // rules.kv_align * rules.kv_align
            row[NODE_START] = start
            row[NODE_REACH] = end if _pays(row, gains[node], end - start, rules) else start
            is_changed = True
    tiles = tokens = 0
    saved: Any = np.int64(0)
    for node in range(nodes):
        row = forest[node]
        if row[NODE_REACH] > row[NODE_START]:
            tiles += _tiles(row[NODE_TOKENS], rules)
            tokens += row[NODE_TOKENS]
            saved += gains[node] * (row[NODE_REACH] - row[NODE_START])
    return tiles, tokens, saved


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def fold_all(forest: Int32s) -> None:
    """Fold every node: all sequences are read alone."""
    forest[:, NODE_START] = 0
    forest[:, NODE_REACH] = 0


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def shared_keys(sequence: int, forest: Int32s) -> int:
    """Keys of a sequence that are read by its nodes."""
    deepest = forest[sequence, DEEPEST]
    return int(forest[deepest, NODE_REACH]) if deepest >= 0 else 0


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def splits_to(node: int, forest: Int32s) -> int:
    """Splits of a node and of all nodes above it."""
    splits = 0
    while node >= 0:
        splits += forest[node, NODE_SPLITS]
        node = forest[node, NODE_PARENT]
    return splits


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _tiles(tokens: int, rules: CutRules) -> int:
    """Query tiles of so many query tokens."""
    count = rules.tile_tokens[tile_of(tokens, rules)]
    tiles: int = (tokens + count - 1) // count
    return tiles


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _key_cost(tokens: int, rules: CutRules) -> int:
    """Cost of one key for the tiles of so many query tokens, in 1/256 ns."""
    cost: int = np.int64(_tiles(tokens, rules)) * rules.costs[1, tile_of(tokens, rules)]
    return cost


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def gain_of(node: int, prefixes: SharedPrefixes, rules: CutRules, forest: Int32s) -> int:
    """Cost of a key for the branches of a node, less that for its members together."""
    tokens = forest[node, NODE_TOKENS]
    if tokens == 0:
        return 0
    apart = np.int64(0)
    rest = tokens
    for other in range(len(prefixes.leaders)):
        if forest[other, OWN_NODE] == node:
            apart += _key_cost(forest[other, SUBTREE], rules)
            rest -= forest[other, SUBTREE]
    gain: int = apart + _key_cost(rest, rules) - _key_cost(tokens, rules)
    return gain


@njit(cache=True, inline="always")  # type: ignore[untyped-decorator]
def _pays(row: Int32s, gain: int, keys: int, rules: CutRules) -> bool:
    """Whether a node pays that reads so many keys."""
    least = PARTIAL_KEYS * rules.group * np.int64(row[NODE_TOKENS]) * rules.costs[1, 0]
    saved = gain * keys
    return (
        keys >= rules.least_prefix and saved > least and saved * rules.kv_heads >= rules.least_saved
    )
