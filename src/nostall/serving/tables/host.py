"""Host builder: task tables of a batch in tens of microseconds, into arrays that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.batch.ragged import RaggedBatch
from nostall.serving.errors import BadTables, CapacityExceeded
from nostall.serving.tables.columns import (
    FIRST_PREFIX_SPLIT,
    FIRST_ROW,
    KV_END,
    KV_HEAD,
    KV_START,
    PARTIAL,
    PREFIX_FIRST_ROW,
    PREFIX_HEAD_ROWS,
    PREFIX_QUERY,
    PREFIX_SPLIT_ROWS,
    QUERY_COUNT,
    QUERY_START,
    REDUCTION_KV_HEAD,
    SEQUENCE,
    SPLITS,
    TILE,
)
from nostall.serving.tables.costs import FRACTION_BITS, MAX_COST_NS
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, CutRules, cut_rules
from nostall.serving.tables.orders import Order, find_order
from nostall.serving.tables.prefix.forest import FOREST_COLUMNS, arrange, choose_nodes, fold_all
from nostall.serving.tables.prefix.leaders import NO_PREFIXES, SharedPrefixes
from nostall.serving.tables.query_tiles import (
    TILE_BEFORE,
    TILE_COLUMNS,
    TILE_COST,
    TILE_COUNT,
    TILE_INDEX,
    TILE_KV_END,
    TILE_KV_START,
    TILE_PACKED,
    TILE_PREFIX,
    TILE_PREFIX_ROW,
    TILE_RANK,
    TILE_SEQUENCE,
    TILE_SPLIT_KEYS,
    TILE_SPLITS,
    TILE_START,
    TILE_UNITS,
    count_tiles,
    count_units,
    cut_tiles,
)
from nostall.serving.tables.settings import TableCapacity, TableSettings, TaskTables

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HostBuilder:
    """Builds the tables of batches into one set of arrays; each build overwrites the last."""

    settings: TableSettings
    capacity: TableCapacity
    tables: TaskTables
    _order: Order
    _rules: CutRules
    _forest: Int32s
    _gains: Int64s
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
            np.zeros((capacity.sequences, FOREST_COLUMNS), np.int32),
            np.zeros(capacity.sequences, np.int64),
            np.zeros((capacity.tiles, TILE_COLUMNS), np.int32),
            np.zeros(capacity.units, np.int32),
            np.zeros(capacity.units, np.int32),
        )

    def build(
        self, query_lengths: Int32s, kv_lengths: Int32s, prefixes: SharedPrefixes = NO_PREFIXES
    ) -> TaskTables:
        """The tables of a batch, in the builder's arrays. The lengths are int32, shape (S,).

        Raises :class:`CapacityExceeded` if the batch needs more; the arrays then hold no unit.
        """
        tables, capacity, rules = self.tables, self.capacity, self._rules
        if len(query_lengths) > capacity.sequences:
            self._refuse(query_lengths, kv_lengths, prefixes)
        prefix_tiles, prefix_rows, saved = self._choose(query_lengths, prefixes)
        count = count_tiles(query_lengths, rules) + prefix_tiles
        if count > capacity.tiles:
            self._refuse(query_lengths, kv_lengths, prefixes)
        tiles = self._tiles[:count]
        cut_tiles(query_lengths, kv_lengths, prefixes, self._forest, rules, tiles)
        units, reductions, scratch_rows = count_units(tiles, rules)
        programs = self.settings.programs if self._order.is_persistent else units
        if (
            units > capacity.units
            or reductions > capacity.reductions
            or scratch_rows > capacity.scratch_rows
            or programs > capacity.programs
        ):
            self._refuse(query_lengths, kv_lengths, prefixes)
        self._order.sort(tiles, self.settings.cost_classes)
        _costs_by_rank(tiles, self._costs)
        programs = self._order.deal(
            self._costs, units, self.settings.programs, tables.program_offsets, self._places
        )
        tables.program_offsets[programs + 1 :] = units
        _fill_tables(tiles, self._places, rules, tables.tasks, tables.reductions)
        if prefix_rows > 0:
            _fill_prefix_rows(tiles, rules, tables.prefix_rows)
        tables.counts[:] = (units, reductions, scratch_rows, programs, prefix_rows, saved)
        return tables

    def _choose(self, query_lengths: Int32s, prefixes: SharedPrefixes) -> tuple[int, int, int]:
        """Query tiles of the kept nodes, prefix rows, and the count SAVED_NS."""
        arrange(query_lengths, prefixes, self._forest)
        tiles, tokens, saved = choose_nodes(prefixes, self._rules, self._forest, self._gains)
        if tiles == 0:
            return 0, 0, 0
        rows = int(query_lengths.sum())
        if tiles > self.capacity.prefix_tiles or max(rows, tokens) > self.capacity.prefix_rows:
            fold_all(self._forest)
            return 0, 0, -1
        saved_ns = (saved >> FRACTION_BITS) * self.settings.kv_heads // self.settings.programs
        return tiles, rows, min(saved_ns, MAX_COST_NS)

    def _refuse(
        self, query_lengths: Int32s, kv_lengths: Int32s, prefixes: SharedPrefixes
    ) -> NoReturn:
        """Empty the tables and raise :class:`CapacityExceeded` with the capacity needed."""
        self.tables.program_offsets[:] = 0
        self.tables.counts[:] = 0
        needed = needed_capacity(query_lengths, kv_lengths, self.settings, prefixes)
        names = TableCapacity.__dataclass_fields__
        has = self.capacity
        exceeded = [name for name in names if getattr(needed, name) > getattr(has, name)]
        parts = [f"{name} {getattr(needed, name)} (has {getattr(has, name)})" for name in exceeded]
        raise CapacityExceeded(
            f"the batch needs a larger table capacity: {', '.join(parts)}; allocate {needed}"
        )


def needed_capacity(
    query_lengths: Int32s,
    kv_lengths: Int32s,
    settings: TableSettings,
    prefixes: SharedPrefixes = NO_PREFIXES,
) -> TableCapacity:
    """The smallest capacity that holds the tables of a batch."""
    rules, order, sequences = cut_rules(settings), find_order(settings.order), len(query_lengths)
    forest = np.zeros((sequences, FOREST_COLUMNS), np.int32)
    arrange(query_lengths, prefixes, forest)
    prefix_tiles, tokens, _ = choose_nodes(prefixes, rules, forest, np.zeros(sequences, np.int64))
    prefix_rows = max(int(query_lengths.sum()), tokens) if prefix_tiles else 0
    count = count_tiles(query_lengths, rules) + prefix_tiles
    tiles = np.zeros((count, TILE_COLUMNS), np.int32)
    cut_tiles(query_lengths, kv_lengths, prefixes, forest, rules, tiles)
    units, reductions, scratch_rows = count_units(tiles, rules)
    programs = settings.programs if order.is_persistent else units
    return TableCapacity(
        sequences, count, units, reductions, scratch_rows, programs, prefix_rows, prefix_tiles
    )


def bounded_capacity(
    settings: TableSettings,
    sequences: int,
    query_tokens: int,
    keys: int,
    prefix_levels: int = 0,
) -> TableCapacity:
    """A capacity for all batches of at most these sequences, query tokens and keys of a sequence.

    ``prefix_levels``: how many kept nodes of the prefix forest a query token is in, on average over
    the query tokens; 0: no shared prefixes. The capacity has a query tile of a node for each
    sequence. Batches whose prefixes need more fit too: they are built without shared prefixes.

    With R keys that all query tiles see together, a ``split`` of s keys gives at most R / s units
    more than query tiles, and splitting by cost at most ``programs * units_per_program / kv_heads``
    more, of each KV head. Of a tile whose keys are split at least one split is more; a query token
    of a node has a partial result of its own keys, and one of each node.
    """
    if min(sequences, query_tokens, keys) < 1:
        raise BadTables(
            f"limits of {sequences} sequences, {query_tokens} query tokens and {keys} keys; "
            "allowed are numbers of 1 or more"
        )
    rules, heads = settings.tiles, settings.kv_heads
    tokens = rules.tile_tokens(settings.group)
    own = min(sequences + query_tokens // tokens[-1], query_tokens)
    levels = prefix_levels if settings.tiles.least_prefix and not settings.window else 0
    prefix_tiles, prefix_rows = (sequences, query_tokens * levels) if levels else (0, 0)
    tiles = own + prefix_tiles
    visible = keys
    if settings.window:
        visible = min(keys, settings.window + max(tokens) + rules.kv_align)
    parts = settings.programs * rules.units_per_program
    more = tiles * visible // rules.split + parts // heads
    units = heads * (tiles + more)
    most_splits = -(-visible // min(rules.split, rules.least_split))
    split_rows = 2 * more * heads * max(tokens) * settings.group
    if levels:
        scratch_rows = split_rows + settings.heads * (query_tokens + prefix_rows)
    else:
        scratch_rows = min(split_rows, query_tokens * settings.heads * most_splits)
    programs = settings.programs if find_order(settings.order).is_persistent else units
    reductions = heads * (own if levels else min(own, more))
    return TableCapacity(
        sequences, tiles, units, reductions, scratch_rows, programs, prefix_rows, prefix_tiles
    )


def build_tables(batch: RaggedBatch, settings: TableSettings) -> TaskTables:
    """The tables of one batch, in arrays of exactly the capacity that it needs."""
    lengths = batch.query_lengths, batch.kv_lengths
    prefixes = SharedPrefixes.of(batch.prefix_groups, len(batch))
    capacity = needed_capacity(*lengths, settings, prefixes)
    return HostBuilder.of(settings, capacity).build(*lengths, prefixes)


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _costs_by_rank(tiles: Int32s, costs: Int32s) -> None:
    for row in tiles:
        costs[row[TILE_RANK] : row[TILE_RANK] + row[TILE_UNITS]] = row[TILE_COST]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _fill_tables(
    tiles: Int32s, places: Int32s, rules: CutRules, tasks: Int32s, reductions: Int32s
) -> None:
    """Write the units, of which head varies fastest, and the reductions, in the batch's order."""
    heads = rules.kv_heads
    reduction = 0
    scratch_row = 0
    for row in tiles:
        is_prefix = row[TILE_PREFIX] == 1
        splits, rows = row[TILE_BEFORE] + row[TILE_SPLITS], row[TILE_COUNT] * rules.group
        rank = row[TILE_RANK]
        for split in range(row[TILE_SPLITS]):
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
                place = row[TILE_BEFORE] + split
                partial = scratch_row + (head * splits + place) * rows if splits > 1 else -1
                task[PARTIAL] = FIRST_PREFIX_SPLIT - place if is_prefix else partial
        if splits > 1 and not is_prefix:
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


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _fill_prefix_rows(tiles: Int32s, rules: CutRules, out: Int32s) -> None:
    """Write where the partial results of shared prefixes of each query token go."""
    scratch_row = 0
    for tile in tiles:
        if tile[TILE_PREFIX]:
            continue
        splits, rows = tile[TILE_BEFORE] + tile[TILE_SPLITS], tile[TILE_COUNT] * rules.group
        for token in range(tile[TILE_COUNT]):
            to = out[tile[TILE_PREFIX_ROW] + token]
            to[PREFIX_QUERY] = tile[TILE_PACKED] + token
            to[PREFIX_FIRST_ROW] = -1
            if tile[TILE_BEFORE]:
                to[PREFIX_FIRST_ROW] = scratch_row + token * rules.group
            to[PREFIX_SPLIT_ROWS] = rows
            to[PREFIX_HEAD_ROWS] = splits * rows
        if splits > 1:
            scratch_row += rules.kv_heads * splits * rows
