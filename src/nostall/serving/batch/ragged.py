"""A ragged batch: the sequences of one serving step, with their lengths, pages and tree masks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.serving.errors import BadBatch

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_SPECULATIVE = 64
"""Largest limit of speculative query tokens: a row of a tree mask is one 64-bit word."""


class Stage(IntEnum):
    """What a sequence does in this step."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2
    PREFIX = 3
    """Query tokens of a prefix group over the keys that they share; of no sequence by itself."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences whose first tokens are the same and lie in the same pages."""

    sequences: tuple[int, ...]
    tokens: int
    """Shared tokens; a multiple of the page size."""


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The sequences of one step; checked by :func:`nostall.serving.batch.checks.check_batch`.

    S is the number of sequences. Query token i of a sequence has the position
    ``kv_length - query_length + i`` and sees the keys up to its own position; in a sequence with a
    tree mask it sees all keys before the query, and of the query's own those that the mask names.
    """

    query_lengths: Int32s
    """Query tokens of each sequence in this step, shape (S,); 0 is a sequence without work."""
    kv_lengths: Int32s
    """Keys of each sequence, those of its query tokens included, shape (S,)."""
    block_table: Int32s
    """Page of each block of ``page_size`` keys, shape (S, pages). Entries past the last key are not
    used and may hold anything."""
    page_size: int
    """Keys of a page; a multiple of 16."""
    speculative: Bools
    """Whether the query tokens of a sequence are a draft to be verified, shape (S,)."""
    tree_masks: tuple[Bools | None, ...] = ()
    """For each sequence None (causal) or bool (query, query): row i marks the query tokens that
    token i sees. Empty if no sequence has a tree."""
    speculative_limit: int = 32
    """Query tokens up to which a speculative sequence is verified; longer ones are prefills."""
    prefix_groups: tuple[PrefixGroup, ...] = ()
    """Sequences that share a prefix. Two groups have no sequence in common, or one of them lies
    within the other and shares more tokens."""

    def __len__(self) -> int:
        return len(self.query_lengths)

    @property
    def query_starts(self) -> Int32s:
        """First row of each sequence in the packed queries and the total, shape (S + 1,)."""
        starts = np.zeros(len(self) + 1, np.int32)
        np.cumsum(self.query_lengths, out=starts[1:])
        return starts

    @property
    def stages(self) -> Int32s:
        """The :class:`Stage` of each sequence, shape (S,)."""
        lengths = self.query_lengths
        is_verify = self.speculative & (lengths > 1) & (lengths <= self.speculative_limit)
        stages = np.where(is_verify, Stage.VERIFY, Stage.PREFILL)
        return np.where(lengths == 1, Stage.DECODE, stages).astype(np.int32)

    def tree_mask(self, sequence: int) -> Bools | None:
        """The tree mask of a sequence, or None if its queries are causal."""
        return self.tree_masks[sequence] if self.tree_masks else None


class PackedTrees(NamedTuple):
    """Tree masks of a batch as words: kernels read one word for each query token."""

    offsets: Int32s
    """Index of the first word of each sequence, -1 without a tree, shape (S,)."""
    words: Int64s
    """Bit j of word ``offsets[s] + i``: query token i of sequence s sees its query token j."""


def pack_trees(batch: RaggedBatch) -> PackedTrees:
    """The tree masks of a batch as words; one zero word if there is no tree."""
    offsets = np.full(len(batch), -1, np.int32)
    words: list[Int64s] = []
    count = 0
    for sequence, mask in enumerate(batch.tree_masks):
        if mask is None:
            continue
        offsets[sequence] = count
        words.append(_words(mask))
        count += len(mask)
    return PackedTrees(offsets, np.concatenate(words) if words else np.zeros(1, np.int64))


def _words(mask: Bools) -> Int64s:
    bits = np.uint64(1) << np.arange(mask.shape[1], dtype=np.uint64)
    summed = np.where(mask, bits[None, :], np.uint64(0)).sum(axis=1, dtype=np.uint64)
    return np.asarray(summed.view(np.int64))


def check_tree(mask: Bools, query_length: int, what: str) -> None:
    """Raise :class:`BadBatch` unless a mask is the ancestor relation of a forest.

    Each token sees itself and its ancestors, which come before it: it sees what its last ancestor
    sees, or only itself (a root).
    """
    if mask.dtype != np.bool_ or mask.shape != (query_length, query_length):
        raise BadBatch(
            f"{what}: the tree mask is {mask.dtype} {mask.shape}; allowed is bool "
            f"({query_length}, {query_length}), one row for each query token"
        )
    if not mask.diagonal().all():
        token = int(np.flatnonzero(~mask.diagonal())[0])
        raise BadBatch(f"{what}: token {token} of the tree mask does not see itself; set its bit")
    if np.triu(mask, 1).any():
        row, column = (int(axis[0]) for axis in np.nonzero(np.triu(mask, 1)))
        raise BadBatch(
            f"{what}: token {row} of the tree mask sees the later token {column}; order the tokens "
            "so that parents come first"
        )
    for token in range(1, query_length):
        ancestors = np.flatnonzero(mask[token, :token])
        if len(ancestors) and not np.array_equal(mask[token, :token], mask[ancestors[-1], :token]):
            raise BadBatch(
                f"{what}: the tree mask is no tree: token {token} and its last ancestor "
                f"{int(ancestors[-1])} see different tokens before them; a token sees itself and "
                "what its parent sees"
            )


def tree_mask(parents: list[int]) -> Bools:
    """The mask of a tree: ``parents[i]`` is the parent of token i (before it), -1 for a root."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for token, parent in enumerate(parents):
        if not -1 <= parent < token:
            raise BadBatch(
                f"token {token} of a tree has the parent {parent}; allowed are -1 and the tokens "
                "before it"
            )
        if parent >= 0:
            mask[token, :token] = mask[parent, :token]
    return mask
