"""Seeded batches of unusual lengths, to check kernels: empty, one token, at borders of pages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.serving.batch.examples import make_batch, random_tree
from nostall.serving.batch.ragged import Bools, PrefixGroup, RaggedBatch


def odd_batch(
    rng: np.random.Generator,
    page_size: int,
    *,
    seed: int = 0,
    has_prefixes: bool = False,
    has_trees: bool = False,
) -> RaggedBatch:
    """A batch of odd lengths; ``seed`` draws the order of its pages.

    ``has_prefixes``: add sequences with short queries, and groups of sequences that share a prefix.
    ``has_trees``: give half of the sequences of 2 to 32 query tokens a random tree mask.
    """
    queries, keys = draw_lengths(rng, page_size)
    groups: list[PrefixGroup] = []
    if has_prefixes:
        for _ in range(int(rng.integers(2, 9))):
            query = int(rng.choice([1, 1, 1, 2, 5, 17]))
            queries.append(query)
            keys.append(query + int(rng.integers(300, 3000)))
        groups = _draw_groups(rng, np.array(keys) - np.array(queries), page_size)
    masks: list[Bools | None] = []
    if has_trees:
        masks = [
            random_tree(query, rng) if 1 < query <= 32 and rng.random() < 0.5 else None
            for query in queries
        ]
    return make_batch(
        queries,
        keys,
        [mask is not None for mask in masks],
        tree_masks=masks,
        page_size=page_size,
        prefix_groups=groups,
        seed=seed,
    )


def draw_lengths(rng: np.random.Generator, page: int) -> tuple[list[int], list[int]]:
    """Query and KV lengths of a batch: empty, one token, odd, at borders of pages and tiles."""
    borders = [0, 1, 2, page - 1, page, page + 1, 31, 32, 33, 127, 128, 129, 255, 257]
    queries, keys = [], []
    for _ in range(int(rng.integers(1, 9))):
        query = int(rng.choice(borders)) if rng.random() < 0.6 else int(rng.integers(1, 1200))
        context = [0, int(rng.choice(borders)), int(rng.integers(0, 3000))][int(rng.integers(3))]
        queries.append(query)
        keys.append(query + context if query else 0)
    return queries, keys


def _draw_groups(
    rng: np.random.Generator, before: NDArray[np.int64], page_size: int
) -> list[PrefixGroup]:
    """Groups of the sequences that have at least 256 keys ``before`` their queries, and groups
    within them that share more."""
    free = rng.permutation(np.flatnonzero(before >= 256)).tolist()
    groups = []
    while len(free) > 1:
        count = int(rng.integers(2, len(free) + 1))
        members, free = free[:count], free[count:]
        pages = int(rng.integers(1, before[members].min() // page_size + 1))
        groups.append(PrefixGroup(tuple(members), pages * page_size))
        inner = members[: count // 2]
        more = int(before[inner].min(initial=1 << 20)) // page_size
        if len(inner) > 1 and more > pages:
            pages = int(rng.integers(pages + 1, more + 1))
            groups.append(PrefixGroup(tuple(inner), pages * page_size))
    return groups


def unowned_slots(ragged: RaggedBatch) -> Bools:
    """Whether no sequence has a key in a slot, shape (pages, page size); no kernel may use it."""
    pages = int(np.max(ragged.block_table, initial=0)) + 1
    is_free = np.ones((pages, ragged.page_size), np.bool_)
    for sequence, length in enumerate(ragged.kv_lengths.tolist()):
        at = np.arange(length)
        is_free[ragged.block_table[sequence, at // ragged.page_size], at % ragged.page_size] = False
    return is_free
