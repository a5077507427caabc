"""Host builder: task tables of a batch in tens of microseconds, into arrays that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.errors import CapacityExceeded
from nostall.serving.tables.columns import (
    FIRST_ROW,
    KV_END,
    KV_HEAD,
    KV_START,
    PARTIAL,
    QUERY_COUNT,
    QUERY_START,
    REDUCTION_KV_HEAD,
    SEQUENCE,
    SPLITS,
    TILE,
)
from nostall.serving.tables.orders import Order, find_order
from nostall.serving.tables.query_tiles import (
    NO_REFERENCE_COUNTS,
    TILE_COLUMNS,
    TILE_COST,
    TILE_COUNT,
    TILE_INDEX,
    TILE_KV_END,
    TILE_KV_START,
    TILE_RANK,
    TILE_SEQUENCE,
    TILE_SPLIT_KEYS,
    TILE_SPLITS,
    TILE_START,
    TILE_UNITS,
    CutRules,
    count_tiles,
    count_units,
    cut_rules,
    cut_tiles,
)
from nostall.serving.tables.settings import TableCapacity, TableSettings, TaskTables

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class HostBuilder:
    """Builds the tables of batches into one set of arrays; each build overwrites the last."""

    settings: TableSettings
    capacity: TableCapacity
    tables: TaskTables
    _order: Order
    _rules: CutRules
    _tiles: Int32s
    _costs: Int32s
    _places: Int32s

    @staticmethod
    def of(settings: TableSettings, capacity: TableCapacity) -> HostBuilder:
        """A builder with arrays of a capacity."""
        return HostBuilder(
            settings,
            capacity,
            TaskTables.empty(capacity),
            find_order(settings.order),
            cut_rules(settings),
            np.zeros((capacity.tiles, TILE_COLUMNS), np.int32),
            np.zeros(capacity.units, np.int32),
            np.zeros(capacity.units, np.int32),
        )

    def build(self, query_lengths: Int32s, kv_lengths: Int32s) -> TaskTables:
        """The tables of a batch, in the builder's arrays. The lengths are int32, shape (S,).

        Raises :class:`CapacityExceeded` if the batch needs more; the arrays then hold no unit.
        """
        tables, capacity, rules = self.tables, self.capacity, self._rules
        count = count_tiles(query_lengths, rules)
        if count > capacity.tiles or len(query_lengths) > capacity.sequences:
            self._refuse(query_lengths, kv_lengths)
        tiles = self._tiles[:count]
        cut_tiles(query_lengths, kv_lengths, rules, tiles)
        units, reductions, scratch_rows = count_units(tiles, rules.group)
        programs = self.settings.programs if self._order.is_persistent else units
        if (
            units > capacity.units
            or reductions > capacity.reductions
            or scratch_rows > capacity.scratch_rows
            or programs > capacity.programs
        ):
            self._refuse(query_lengths, kv_lengths)
        self._order.sort(tiles, self.settings.cost_classes)
        _costs_by_rank(tiles, self._costs)
        programs = self._order.deal(
            self._costs, units, self.settings.programs, tables.program_offsets, self._places
        )
        tables.program_offsets[programs + 1 :] = units
        _fill(tiles, self._places, rules, tables.tasks, tables.reductions)
        tables.counts[:] = (units, reductions, scratch_rows, programs)
        return tables

    def _refuse(self, query_lengths: Int32s, kv_lengths: Int32s) -> None:
        """Empty the tables and raise :class:`CapacityExceeded` with the capacity needed."""
        self.tables.program_offsets[:] = 0
        self.tables.counts[:] = 0
        needed, has = needed_capacity(query_lengths, kv_lengths, self.settings), self.capacity
        names = TableCapacity.__dataclass_fields__
        exceeded = [name for name in names if getattr(needed, name) > getattr(has, name)]
        parts = [f"{name} {getattr(needed, name)} (has {getattr(has, name)})" for name in exceeded]
        raise CapacityExceeded(
            f"the batch needs a larger table capacity: {', '.join(parts)}; allocate {needed}"
        )


def needed_capacity(
    query_lengths: Int32s, kv_lengths: Int32s, settings: TableSettings
) -> TableCapacity:
    """The smallest capacity that holds the tables of a batch."""
    rules, order = cut_rules(settings), find_order(settings.order)
    tiles = np.zeros((count_tiles(query_lengths, rules), TILE_COLUMNS), np.int32)
    cut_tiles(query_lengths, kv_lengths, rules, tiles)
    units, reductions, scratch_rows = count_units(tiles, rules.group)
    programs = settings.programs if order.is_persistent else units
    return TableCapacity(len(query_lengths), len(tiles), units, reductions, scratch_rows, programs)


def build_tables(batch: RaggedBatch, settings: TableSettings) -> TaskTables:
    """The tables of one batch, in arrays of exactly the capacity that it needs."""
    capacity = needed_capacity(batch.query_lengths, batch.kv_lengths, settings)
    return HostBuilder.of(settings, capacity).build(batch.query_lengths, batch.kv_lengths)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _costs_by_rank(tiles: Int32s, costs: Int32s) -> None:
    for row in tiles:
        costs[row[TILE_RANK] : row[TILE_RANK] + row[TILE_UNITS]] = row[TILE_COST]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _fill(
    tiles: Int32s, places: Int32s, rules: CutRules, tasks: Int32s, reductions: Int32s
) -> None:
    """Write the units, of which head varies fastest, and the reductions, in the batch's order."""
    heads = rules.kv_heads
    reduction = 0
    scratch_row = 0
    for row in tiles:
        splits, rows = row[TILE_SPLITS], row[TILE_COUNT] * rules.group
        rank = row[TILE_RANK]
        for split in range(splits):
            start = row[TILE_KV_START] + split * row[TILE_SPLIT_KEYS]
            end = min(start + row[TILE_SPLIT_KEYS], row[TILE_KV_END])
            for head in range(heads):
                task = tasks[places[rank]]
                rank += 1
                task[SEQUENCE] = row[TILE_SEQUENCE]
                task[QUERY_START] = row[TILE_START]
                task[QUERY_COUNT] = row[TILE_COUNT]
                task[KV_START] = start
                task[KV_END] = end
                task[KV_HEAD] = head
                task[TILE] = row[TILE_INDEX]
                task[PARTIAL] = scratch_row + (head * splits + split) * rows if splits > 1 else -1
        if splits > 1:
            for head in range(heads):
                out = reductions[reduction + head]
                out[SEQUENCE] = row[TILE_SEQUENCE]
                out[QUERY_START] = row[TILE_START]
                out[QUERY_COUNT] = row[TILE_COUNT]
                out[REDUCTION_KV_HEAD] = head
                out[FIRST_ROW] = scratch_row + head * splits * rows
                out[SPLITS] = splits
            reduction += heads
            scratch_row += heads * splits * rows
