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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.serving.batch.ragged import PrefixGroup

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


NO_PREFIXES = SharedPrefixes.of((), 0)
