"""Checks of a ragged batch: lengths, pages, tree masks and prefix groups agree."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.serving.batch.ragged import MAX_SPECULATIVE, RaggedBatch, check_tree
from nostall.serving.errors import BadBatch

PAGE_MULTIPLE = 16
"""A page holds a multiple of this many keys."""
MAX_KEYS = 1 << 24
"""Most keys of a sequence."""


def check_batch(batch: RaggedBatch) -> None:
    """Raise :class:`BadBatch` at the first contradiction in a batch."""
    _check_arrays(batch)
    _check_lengths(batch)
    _check_pages(batch)
    _check_trees(batch)
    _check_prefix_groups(batch)


def _check_arrays(batch: RaggedBatch) -> None:
    count = len(batch.query_lengths)
    expected: dict[str, tuple[type, tuple[int, ...]]] = {
        "query_lengths": (np.int32, (count,)),
        "kv_lengths": (np.int32, (count,)),
        "speculative": (np.bool_, (count,)),
    }
    for name, (dtype, shape) in expected.items():
        array: NDArray[Any] = getattr(batch, name)
        if array.dtype != dtype or array.shape != shape:
            raise BadBatch(
                f"{name} is {array.dtype} {array.shape}; allowed is {dtype.__name__} {shape}, one "
                "entry for each sequence"
            )
    table = batch.block_table
    if table.dtype != np.int32 or table.ndim != 2 or len(table) != count:
        raise BadBatch(
            f"block_table is {table.dtype} {table.shape}; allowed is int32 ({count}, pages), one "
            "row for each sequence"
        )
    if batch.page_size < PAGE_MULTIPLE or batch.page_size % PAGE_MULTIPLE:
        raise BadBatch(f"page size {batch.page_size}; allowed are multiples of {PAGE_MULTIPLE}")
    if not 1 <= batch.speculative_limit <= MAX_SPECULATIVE:
        raise BadBatch(
            f"speculative limit {batch.speculative_limit}; allowed are 1 to {MAX_SPECULATIVE}"
        )


def _check_lengths(batch: RaggedBatch) -> None:
    queries, keys = batch.query_lengths, batch.kv_lengths
    _refuse_where(batch, queries < 0, "has a negative query length; allowed is 0 or more")
    _refuse_where(
        batch,
        (keys < 0) | (keys > MAX_KEYS),
        f"has a KV length outside of 0 to {MAX_KEYS}; cut the sequence",
    )
    _refuse_where(
        batch,
        queries > keys,
        "has fewer keys than query tokens; the KV length counts the keys of the query too",
    )


def _check_pages(batch: RaggedBatch) -> None:
    needed = -(-batch.kv_lengths // batch.page_size)
    columns = batch.block_table.shape[1]
    _refuse_where(
        batch,
        needed > columns,
        f"needs more pages of {batch.page_size} keys than the {columns} of the block table; give "
        "a wider block table",
    )
    is_used = np.arange(columns)[None, :] < needed[:, None]
    _refuse_where(
        batch,
        np.any(is_used & (batch.block_table < 0), axis=1),
        f"has no page for some of its keys; give a page number of 0 or more for each "
        f"{batch.page_size} keys",
    )


def _check_trees(batch: RaggedBatch) -> None:
    if batch.tree_masks and len(batch.tree_masks) != len(batch):
        raise BadBatch(
            f"{len(batch.tree_masks)} tree masks for {len(batch)} sequences; give one (or None) "
            "for each sequence, or none at all"
        )
    for sequence, mask in enumerate(batch.tree_masks):
        if mask is None:
            continue
        length = int(batch.query_lengths[sequence])
        what = f"sequence {sequence}"
        if not batch.speculative[sequence] or length > batch.speculative_limit:
            raise BadBatch(
                f"{what} has a tree mask, {length} query tokens and speculative="
                f"{bool(batch.speculative[sequence])}; a tree needs a speculative sequence of at "
                f"most {batch.speculative_limit} query tokens (speculative_limit)"
            )
        check_tree(mask, length, what)


def _check_prefix_groups(batch: RaggedBatch) -> None:
    for place, group in enumerate(batch.prefix_groups):
        what = f"prefix group {group.sequences}"
        members = np.array(group.sequences, np.int64)
        if len(members) < 2 or members.min() < 0 or members.max() >= len(batch):
            raise BadBatch(f"{what}: allowed are two or more sequences from 0 to {len(batch) - 1}")
        if len(set(group.sequences)) != len(members):
            raise BadBatch(f"{what}: a sequence is in a group once")
        for other in batch.prefix_groups[:place]:
            small, large = sorted((group, other), key=lambda one: len(one.sequences))
            if set(small.sequences) & set(large.sequences) and not (
                set(small.sequences) < set(large.sequences) and small.tokens > large.tokens
            ):
                raise BadBatch(
                    f"{what} and {other.sequences} have sequences in common; allowed are groups "
                    "without common sequences, or one within the other that shares more tokens"
                )
        before_query = (batch.kv_lengths - batch.query_lengths)[members].min()
        if not 0 < group.tokens <= before_query or group.tokens % batch.page_size:
            raise BadBatch(
                f"{what} shares {group.tokens} tokens; allowed are multiples of the page size "
                f"{batch.page_size} up to the {before_query} keys before every query"
            )
        pages = batch.block_table[members, : group.tokens // batch.page_size]
        if not (pages == pages[0]).all():
            raise BadBatch(
                f"{what}: the pages of its {group.tokens} shared tokens differ; give all members "
                "the same pages"
            )


def _refuse_where(batch: RaggedBatch, is_wrong: NDArray[np.bool_], problem: str) -> None:
    """Raise :class:`BadBatch` with the first sequence that is wrong and its lengths."""
    if is_wrong.any():
        sequence = int(np.flatnonzero(is_wrong)[0])
        raise BadBatch(
            f"sequence {sequence} ({batch.query_lengths[sequence]} query tokens, "
            f"{batch.kv_lengths[sequence]} keys) {problem}"
        )
