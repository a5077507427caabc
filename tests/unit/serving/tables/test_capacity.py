"""Bounded capacities hold every batch within their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits

from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.rules import BatchKind, plan_for
from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.errors import BadTables
from nostall.serving.tables.columns import PREFIX_ROWS, SAVED_NS
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.host import HostBuilder, bounded_capacity, needed_capacity
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from nostall.serving.tables.settings import TableCapacity, TableSettings
from tests.unit.serving.tables import batches


@given(batches.lengths(), batches.settings())
@limits(max_examples=150)
def test_the_bound_holds_a_batch_at_its_limits(
    lengths: tuple[list[int], list[int]], settings: TableSettings
) -> None:
    queries, keys = lengths
    needed = needed_capacity(*(np.array(values, np.int32) for values in lengths), settings)
    bound = bounded_capacity(settings, max(len(queries), 1), max(sum(queries), 1), max([1, *keys]))
    for name in TableCapacity.__dataclass_fields__:
        assert getattr(bound, name) >= getattr(needed, name), name


@given(batches.grouped(60), batches.settings())
@limits(max_examples=150, deadline=None)
def test_the_bound_holds_a_batch_with_shared_prefixes_or_builds_it_without(
    batch: tuple[list[int], list[int], tuple[PrefixGroup, ...]], settings: TableSettings
) -> None:
    queries, keys, groups = batch
    arrays = np.array(queries, np.int32), np.array(keys, np.int32)
    prefixes = SharedPrefixes.of(groups, len(queries))
    bound = bounded_capacity(
        settings, max(len(queries), 1), max(sum(queries), 1), max([1, *keys]), prefix_levels=2
    )
    needed = needed_capacity(*arrays, settings, prefixes)
    fits = needed.prefix_tiles <= bound.prefix_tiles and needed.prefix_rows <= bound.prefix_rows
    counts = HostBuilder.of(settings, bound).build(*arrays, prefixes).counts
    assert (counts[SAVED_NS] < 0) == (not fits)
    assert (counts[PREFIX_ROWS] > 0) == (fits and needed.prefix_tiles > 0)


@pytest.mark.parametrize(("sequences", "mebibytes"), [(256, 36), (1024, 128)])
def test_the_scratch_of_decodes_with_shared_prefixes_is_tens_of_mebibytes(
    sequences: int, mebibytes: int
) -> None:
    shape = AttentionShape(has_prefixes=True)
    settings = plan_for(shape, BatchKind(True, 1)).table_settings(shape, 132)
    bound = bounded_capacity(settings, sequences, sequences, 131_072, prefix_levels=2)
    assert mebibytes / 2 < bound.scratch_rows * (128 + 1) * 4 / 2**20 < mebibytes


def test_the_tokens_of_a_tile_see_more_keys_than_one_window() -> None:
    """127 tokens with a window of 1 key see 127 keys, which are two splits of at least 128."""
    tiles = TileSet(heights=(16, 64, 128), split=1 << 30, least_split=128, units_per_program=1)
    settings = TableSettings(8, 8, 132, tiles, window=1)
    needed = needed_capacity(np.array([127], np.int32), np.array([129], np.int32), settings)
    assert bounded_capacity(settings, 1, 127, 129).scratch_rows >= needed.scratch_rows > 0


def test_the_bound_of_a_serving_engine_fits_into_megabytes() -> None:
    bound = bounded_capacity(TableSettings(32, 8, 264), 256, 8192, 131_072)
    assert bound.units <= 20_000
    assert bound.scratch_rows == 0


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(BadTables, match="0 sequences"):
        bounded_capacity(TableSettings(8, 8, 132), 0, 1, 1)
