"""Which earlier sequence each sequence shares most keys with: the prefix tree, one pair a sequence.

The *leader* of a sequence is the first of the earlier sequences with which it has the most leading
pages in common. Leaders and shared tokens of all sequences determine the whole prefix tree: the
pair (leader, tokens) names a node, and the first sequence that has this pair stands for it. Its
members are all sequences whose first ``tokens`` tokens lie in the same pages, its leader is the
first of them. :mod:`nostall.serving.tables.prefix.device_leaders` finds the same integers.

A sequence shares whole pages of its own context only, which are those that end at or before
``kv_length - query_length``; a sequence without query tokens shares nothing. Page 0 is vLLM's null
block: it and all pages behind it are shared with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS

Int32s = NDArray[np.int32]


class SharedPrefixes(NamedTuple):
    """The prefix tree of a batch as int32 arrays of one entry for each sequence."""

    leaders: Int32s
    """The first earlier sequence with which it shares most tokens, or -1."""
    tokens: Int32s
    """Tokens that it shares with its leader; 0 without one."""

    @staticmethod
    def of(groups: Sequence[PrefixGroup], sequences: int) -> SharedPrefixes:
        """The arrays of checked groups (:func:`nostall.serving.batch.checks.check_batch`)."""
        leaders = np.full(sequences, -1, np.int32)
        tokens = np.zeros(sequences, np.int32)
        for group in groups:
            first, *others = sorted(group.sequences)
            deeper = [other for other in others if group.tokens > tokens[other]]
            leaders[deeper], tokens[deeper] = first, group.tokens
        return SharedPrefixes(leaders, tokens)

    @staticmethod
    def in_pages(
        block_table: NDArray[Any], query_lengths: Int32s, kv_lengths: Int32s, page_size: int
    ) -> SharedPrefixes:
        """The prefixes that a block table shows, int32 (S, pages)."""
        pages = np.maximum(kv_lengths - query_lengths, 0) // page_size
        pages = np.minimum(np.where(query_lengths > 0, pages, 0), block_table.shape[1])
        leaders = np.full(len(pages), -1, np.int32)
        tokens = np.zeros(len(pages), np.int32)
        _find_leaders(block_table, pages, leaders, tokens)
        return SharedPrefixes(leaders, tokens * np.int32(page_size))

    def groups(self) -> tuple[PrefixGroup, ...]:
        """The nodes of the tree as groups, in the order of the sequences that stand for them.

        Members are in ascending order, so that the leader is the first.
        """
        groups: dict[tuple[int, int], set[int]] = {}
        for leader, tokens in zip(self.leaders.tolist(), self.tokens.tolist(), strict=True):
            if leader >= 0:
                groups.setdefault((leader, tokens), {leader})
        for sequence in range(len(self.leaders)):
            at, common = sequence, np.iinfo(np.int32).max
            while at >= 0:
                for (leader, tokens), members in groups.items():
                    if leader == at and tokens <= common:
                        members.add(sequence)
                common, at = min(common, int(self.tokens[at])), int(self.leaders[at])
        return tuple(PrefixGroup(tuple(sorted(m)), tokens) for (_, tokens), m in groups.items())


NO_PREFIXES = SharedPrefixes.of((), 0)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _find_leaders(table: Int32s, pages: Int32s, leaders: Int32s, shared: Int32s) -> None:
    """Write the leader of each sequence, and the pages that it shares with it."""
    for sequence in range(len(pages)):
        deepest = 0
        for other in range(sequence):
            most = min(pages[sequence], pages[other])
            if most <= deepest or table[other, deepest] != table[sequence, deepest]:
                continue
            common = 0
            while common < most and table[other, common] == table[sequence, common] != 0:
                common += 1
            if common > deepest:
                deepest = common
                leaders[sequence] = other
        shared[sequence] = deepest
