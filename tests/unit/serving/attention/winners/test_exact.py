"""Exact attention of single tokens equals that of whole batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.winners.on_gpu import exact_token, sample_tokens
from nostall.serving.batch.examples import make_batch, random_tree
from tests.unit.serving.attention.reference import exact_attention


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 2, 64),
        AttentionShape(4, 2, 64, window=9, soft_cap=2.0),
        AttentionShape(2, 1, 64, has_trees=True),
    ],
)
def test_tokens_equal_the_batch(shape: AttentionShape) -> None:
    rng = np.random.default_rng(0)
    trees = [None, random_tree(5, rng), None] if shape.has_trees else []
    ragged = make_batch([1, 5, 20], [33, 21, 20], [False, True, False], tree_masks=trees)
    query = rng.standard_normal((26, shape.heads, 64))
    keys, values = rng.standard_normal((2, 8, 16, shape.kv_heads, 64))
    expected = exact_attention(ragged, shape, query, keys, values)
    cache = PagedCache(torch.from_numpy(keys), torch.from_numpy(values))
    for token in sample_tokens(ragged):
        got = exact_token(ragged, shape, torch.from_numpy(query), cache, int(token))
        np.testing.assert_allclose(got.numpy(), expected[token], rtol=1e-9, atol=1e-12)
