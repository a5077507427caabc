"""What a launch refuses before it starts a kernel: tables that its shape cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape, KernelConfig
from nostall.serving.attention.host import HostBatch, execute
from nostall.serving.attention.launch import (
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
)
from nostall.serving.attention.rules import GLUON
from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup, RaggedBatch, pack_trees
from nostall.serving.tables.columns import PREFIX_ROWS, UNITS
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.device import DeviceBuilder
from nostall.serving.tables.host import build_tables, needed_capacity
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from nostall.serving.tables.settings import TableSettings

SHAPE = AttentionShape(4, 2, 64)
WINDOWED = replace(SHAPE, has_prefixes=True, window=100)
BATCH = make_batch([1] * 8, [600] * 8, prefix_groups=(PrefixGroup(tuple(range(8)), 512),))
SETTINGS = TableSettings(4, 2, 2, TileSet((16, 32), least_prefix=64), order="sorted")
CPU = torch.device("cpu")


def tensors(batch: RaggedBatch) -> tuple[torch.Tensor, PagedCache, torch.Tensor, BatchTensors]:
    """Query, cache, result and lengths of a batch."""
    query = torch.zeros(int(batch.query_lengths.sum()), 4, 64, dtype=torch.float16)
    pages = torch.zeros(int(batch.block_table.max()) + 1, 16, 2, 64, dtype=torch.float16)
    lengths = BatchTensors.of(
        batch.query_starts, batch.kv_lengths, batch.block_table, pack_trees(batch), CPU
    )
    return query, PagedCache(pages, pages), torch.full_like(query, 7.0), lengths


@pytest.mark.parametrize("config", [KernelConfig(), GLUON])
@pytest.mark.parametrize("shape", [SHAPE, WINDOWED])
def test_tables_with_groups_need_a_shape_that_has_prefixes(
    shape: AttentionShape, config: KernelConfig
) -> None:
    tables = build_tables(BATCH, SETTINGS)
    assert tables.counts[PREFIX_ROWS] == 8
    query, cache, out, lengths = tensors(BATCH)
    kernel = MetaAttention(shape, config, int(tables.counts[UNITS]))
    buffers = AttentionBuffers.of(tables, 64, CPU)
    with pytest.raises(BadInput, match="has_prefixes True without a window"):
        kernel(query, cache, out, lengths, buffers)
    assert (out == 7.0).all()


@pytest.mark.parametrize("shape", [SHAPE, WINDOWED])
def test_the_host_refuses_the_same_tables(shape: AttentionShape) -> None:
    query, cache, out, lengths = tensors(BATCH)
    batch = HostBatch(BATCH.query_starts, BATCH.kv_lengths, lengths.block_table)
    with pytest.raises(BadInput, match="has_prefixes True without a window"):
        execute(shape, build_tables(BATCH, SETTINGS), batch, query, *cache[:2], out)


def test_device_builders_say_whether_their_tables_may_have_groups() -> None:
    lengths = BATCH.query_lengths, BATCH.kv_lengths
    alone = needed_capacity(*lengths, SETTINGS)
    grouped = needed_capacity(
        *lengths, SETTINGS, SharedPrefixes.of(BATCH.prefix_groups, len(BATCH))
    )
    assert not DeviceBuilder.of(SETTINGS, alone, "cpu").tables.has_prefixes
    assert DeviceBuilder.of(SETTINGS, grouped, "cpu").tables.has_prefixes


def test_buffers_say_whether_their_tables_have_groups() -> None:
    alone = build_tables(replace(BATCH, prefix_groups=()), SETTINGS)
    buffers = AttentionBuffers.of(alone, 64, CPU)
    assert not buffers.tables.has_prefixes
    assert buffers.tables.counts.tolist() == alone.counts.tolist()
    assert AttentionBuffers.of(build_tables(BATCH, SETTINGS), 64, CPU).tables.has_prefixes
