"""The tensors of a batch that plans are timed on."""

from __future__ import annotations

import pytest
import torch

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.winners.on_gpu import MOST_COPIES, TOLERANCE, GpuBatch
from nostall.serving.batch.examples import make_batch
from nostall.serving.errors import BadBatch

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 64)


def test_the_tensors_of_a_batch() -> None:
    ragged = make_batch([1, 5], [300, 40])
    batch = GpuBatch.of(ragged, SHAPE, torch.float32, CPU, 3)
    assert batch.query.shape == (6, 4, 64)
    assert len(batch.caches) == 3
    assert not torch.equal(batch.caches[0].keys, batch.caches[1].keys)
    assert batch.tensors.block_table.shape == (2, 32)
    assert batch.tensors.block_table[:, 19:].eq(0).all()
    out = torch.zeros_like(batch.query)
    out[batch.sampled] = batch.exact.float()
    assert batch.error(out) < 1e-6
    out[batch.sampled[0]] += 2 * TOLERANCE * batch.exact.abs().max()
    assert batch.error(out) > TOLERANCE


def test_one_copy_of_the_cache_is_enough_without_a_gpu() -> None:
    ragged = make_batch([2], [40])
    assert len(GpuBatch.of(ragged, SHAPE, torch.float16, CPU, 1).caches) == 1
    assert MOST_COPIES > 1


def test_a_batch_without_query_tokens() -> None:
    with pytest.raises(BadBatch, match="no query tokens"):
        GpuBatch.of(make_batch([0], [7]), SHAPE, torch.float32, CPU)
