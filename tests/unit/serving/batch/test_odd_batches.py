"""Batches of odd lengths are valid and seeded; free slots are those that no sequence owns."""

from __future__ import annotations

import numpy as np

from nostall.serving.batch.examples import make_batch, odd_batch, unowned_slots
from nostall.serving.batch.ragged import PrefixGroup


def test_batches_follow_from_the_seed() -> None:
    drawn = [odd_batch(np.random.default_rng(seed), 16) for seed in (0, 0, 1)]
    assert drawn[0].kv_lengths.tolist() == drawn[1].kv_lengths.tolist()
    assert drawn[0].kv_lengths.tolist() != drawn[2].kv_lengths.tolist()


def test_many_seeds_reach_empty_sequences_trees_and_groups() -> None:
    batches = [
        odd_batch(np.random.default_rng(seed), 16, has_prefixes=True, has_trees=True)
        for seed in range(20)
    ]
    assert any((batch.query_lengths == 0).any() for batch in batches)
    assert any(batch.prefix_groups for batch in batches)
    masks = [mask for batch in batches for mask in batch.tree_masks if mask is not None]
    assert masks and all(1 < len(mask) <= 32 for mask in masks)


def test_unowned_slots() -> None:
    batch = make_batch([1, 1], [17, 16])
    free = unowned_slots(batch)
    assert free.shape == (3, 16)
    assert (~free).sum() == 33
    assert free[batch.block_table[0, 1], 1:].all()
    shared = make_batch([1, 1], [20, 40], prefix_groups=[PrefixGroup((0, 1), 16)])
    assert (~unowned_slots(shared)).sum() == 16 + 4 + 24
