"""Tree masks of speculative queries: their check, and their form as 64-bit words for kernels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nostall.serving.batch.ragged import Bools, Int32s, Int64s, RaggedBatch
from nostall.serving.errors import BadBatch


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
