"""Bounded capacities hold every batch within their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits

from nostall.serving.errors import BadTables
from nostall.serving.tables.capacity import bounded_capacity
from nostall.serving.tables.host import needed_capacity
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


def test_the_bound_of_a_serving_engine_fits_into_megabytes() -> None:
    bound = bounded_capacity(TableSettings(32, 8, 264), 256, 8192, 131_072)
    assert bound.units <= 20_000
    assert bound.scratch_rows == 0


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(BadTables, match="0 sequences"):
        bounded_capacity(TableSettings(8, 8, 132), 0, 1, 1)
