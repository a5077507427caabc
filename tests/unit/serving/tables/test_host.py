"""The host builder against the slow specification, and the properties that kernels rely on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from benchmarks.serving.host_tables import saved_ns
from hypothesis import given
from hypothesis import settings as limits

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.errors import BadTables, CapacityExceeded
from nostall.serving.tables.columns import (
    KV_END,
    KV_START,
    PREFIX_ROWS,
    PROGRAMS,
    SAVED_NS,
    SPLITS,
    UNITS,
)
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.host import HostBuilder, needed_capacity
from nostall.serving.tables.orders import ORDERS
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from nostall.serving.tables.settings import ORDER_NAMES, TableCapacity, TableSettings, TaskTables
from tests.unit.serving.tables import batches
from tests.unit.serving.tables.specification import specify


def build(
    queries: list[int],
    keys: list[int],
    settings: TableSettings,
    groups: tuple[PrefixGroup, ...] = (),
) -> TaskTables:
    arrays = np.array(queries, np.int32), np.array(keys, np.int32)
    prefixes = SharedPrefixes.of(groups, len(queries))
    capacity = needed_capacity(*arrays, settings, prefixes)
    return HostBuilder.of(settings, capacity).build(*arrays, prefixes)


@given(batches.grouped(), batches.settings())
@limits(max_examples=100, deadline=None)
def test_tables_are_those_of_the_specification(
    batch: tuple[list[int], list[int], tuple[PrefixGroup, ...]], settings: TableSettings
) -> None:
    queries, keys, groups = batch
    tables = build(queries, keys, settings, groups)
    specified = specify(queries, keys, settings, groups)
    assert tables.used_tasks.tolist() == [list(unit[:8]) for unit in specified.units]
    assert tables.used_reductions.tolist() == [list(row) for row in specified.reductions]
    assert tables.used_prefix_rows.tolist() == [list(row) for row in specified.prefix_rows]
    ends = np.cumsum([0, *map(len, specified.programs)])
    assert tables.used_offsets.tolist() == ends.tolist()
    assert tables.counts[:SAVED_NS].tolist() == [
        len(specified.units),
        len(specified.reductions),
        specified.scratch_rows,
        len(specified.programs),
        len(specified.prefix_rows),
    ]


@given(batches.lengths(), batches.settings())
@limits(max_examples=40, deadline=None)
def test_units_cover_each_visible_key_of_each_row_once(
    lengths: tuple[list[int], list[int]], settings: TableSettings
) -> None:
    """Each query token and KV head is in one tile, whose units cover the keys that it sees."""
    queries, keys = lengths
    covered: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for sequence, start, count, low, high, head, tile, _ in build(
        queries, keys, settings
    ).used_tasks.tolist():
        assert 1 <= count * settings.group <= settings.tiles.heights[tile]
        for token in {start, start + count - 1}:
            covered.setdefault((sequence, head, token), []).append((low, high))
        assert low % settings.tiles.kv_align == 0
        assert low < high <= keys[sequence] - queries[sequence] + start + count
    for (sequence, _, token), ranges in covered.items():
        ranges.sort()
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        position = keys[sequence] - queries[sequence] + token
        first = max(0, position - settings.window + 1) if settings.window else 0
        assert ranges[0][0] <= first
        assert ranges[-1][1] > position
    last_tokens = {(sequence, token) for sequence, _, token in covered}
    for sequence, query in enumerate(queries):
        assert not query or {(sequence, 0), (sequence, query - 1)} <= last_tokens


@given(batches.lengths(), batches.settings())
@limits(max_examples=30, deadline=None)
def test_a_larger_capacity_gives_the_same_tables(
    lengths: tuple[list[int], list[int]], settings: TableSettings
) -> None:
    arrays = tuple(np.array(values, np.int32) for values in lengths)
    exact = needed_capacity(*arrays, settings)
    larger = TableCapacity(*(3 * size + 5 for size in vars(exact).values()))
    tables = HostBuilder.of(settings, larger).build(*arrays)
    assert tables.used_tasks.tolist() == build(*lengths, settings).used_tasks.tolist()
    behind = tables.program_offsets[tables.counts[PROGRAMS] :]
    assert set(behind.tolist()) == {int(tables.counts[UNITS])}


SETTINGS = TableSettings(32, 8, 132, TileSet(split=512, least_prefix=256))
BATCH = np.array([1, 1, 1, 1], np.int32), np.array([4000, 3000, 3000, 700], np.int32)
THREE = SharedPrefixes.of([PrefixGroup((0, 2, 1), 2048)], 4)
FIELDS = TableCapacity.__dataclass_fields__.keys() - {"prefix_rows", "prefix_tiles"}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_capacity_that_is_exceeded_is_an_error_and_leaves_no_unit(name: str) -> None:
    exact = needed_capacity(*BATCH, SETTINGS, THREE)
    fields = vars(exact)
    builder = HostBuilder.of(SETTINGS, TableCapacity(**{**fields, name: fields[name] - 1}))
    with pytest.raises(
        CapacityExceeded, match=rf"{name} {fields[name]} \(has {fields[name] - 1}\)"
    ):
        builder.build(*BATCH, THREE)
    assert not builder.tables.counts.any()
    assert not builder.tables.program_offsets.any()


@pytest.mark.parametrize("name", ["prefix_rows", "prefix_tiles"])
def test_prefixes_that_exceed_the_capacity_are_left_out_and_counted(name: str) -> None:
    exact = needed_capacity(*BATCH, SETTINGS, THREE)
    assert (exact.prefix_rows, exact.prefix_tiles) == (4, 1)
    larger = TableCapacity(*(3 * size for size in vars(exact).values()))
    cut = replace(larger, **{name: getattr(exact, name) - 1})
    tables = HostBuilder.of(SETTINGS, cut).build(*BATCH, THREE)
    alone = HostBuilder.of(SETTINGS, cut).build(*BATCH)
    assert tables.counts[SAVED_NS] == -1
    assert tables.counts[:SAVED_NS].tolist() == alone.counts[:SAVED_NS].tolist()
    assert tables.used_tasks.tolist() == alone.used_tasks.tolist()


def test_a_system_prompt_and_the_prompts_behind_it_are_read_once_each() -> None:
    """Four prompts of eight samples each behind one system prompt, and a stranger."""
    groups = (
        PrefixGroup(tuple(range(32)), 2048),
        *(PrefixGroup(tuple(range(first, 32, 4)), 3072) for first in range(4)),
    )
    settings = TableSettings(32, 8, 132, TileSet((16, 64), least_prefix=256))
    tables = build([1] * 33, [3500] * 33, settings, groups)
    keys = (tables.used_tasks[:, KV_END] - tables.used_tasks[:, KV_START]).sum() // 8
    tiles_of_all = 2  # Of 16 decodes each.
    assert keys == tiles_of_all * 2048 + 4 * 1024 + 32 * (3500 - 3072) + 3500
    assert tables.counts[PREFIX_ROWS] == 33
    splits = tables.used_reductions[:, SPLITS]
    assert len(splits) == 32 * 8
    assert set(splits.tolist()) == {3}


def test_decodes_read_a_long_shared_prefix_once_and_prefills_do_not() -> None:
    settings = TableSettings(32, 8, 132, TileSet((16, 64), least_prefix=256))
    group = (PrefixGroup(tuple(range(16)), 2048),)
    decodes = build([1] * 16, [3000] * 16, settings, group)
    assert decodes.counts.tolist()[:SAVED_NS] == [17 * 8, 16 * 8, 2 * 16 * 32, 132, 16]
    assert decodes.counts[SAVED_NS] > 10_000
    keys = (decodes.used_tasks[:, KV_END] - decodes.used_tasks[:, KV_START]).sum() // 8
    assert keys == 2048 + 16 * (3000 - 2048)
    prefills = build([1000] * 16, [4000] * 16, settings, group)
    assert prefills.counts[PREFIX_ROWS] == 0


def test_groups_save_at_least_what_the_tile_set_says() -> None:
    group = (PrefixGroup(tuple(range(4)), 4096),)

    def settings(least_saved_ns: int) -> TableSettings:
        tiles = TileSet((16, 64), least_prefix=256, least_saved_ns=least_saved_ns)
        return TableSettings(32, 8, 264, tiles)

    def prefix_rows(least_saved_ns: int) -> int:
        tables = build([1] * 4, [4608] * 4, settings(least_saved_ns), group)
        return int(tables.counts[PREFIX_ROWS])

    saved = saved_ns(np.ones(4, np.int32), group[0], settings(0))
    assert saved > 1000
    rows = [prefix_rows(least) for least in (0, int(saved), int(saved) + 1, 10**9)]
    assert rows == [4, 4, 0, 0]
    for refused in (-1, 10**9 + 1):
        with pytest.raises(BadTables, match=f"least_saved_ns {refused}; allowed are 0 to"):
            prefix_rows(refused)


def test_costs_split_a_long_decode_among_idle_programs() -> None:
    settings = TableSettings(8, 8, 132, TileSet(units_per_program=1, least_split=256))
    tables = build([1], [16_384], settings)
    assert 120 <= tables.counts[UNITS] <= 136
    keys = tables.used_tasks[:, KV_END] - tables.used_tasks[:, KV_START]
    assert keys.max() - keys.min() < 1024


def test_the_names_of_the_orders_are_known_without_numba() -> None:
    assert tuple(ORDERS) == ORDER_NAMES
