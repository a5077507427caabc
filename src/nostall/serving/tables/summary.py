"""The Token-Table of a batch, and a summary of its task tables: units, loads, imbalance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.serving.batch.ragged import RaggedBatch, Stage
from nostall.serving.tables.columns import (
    FIRST_PREFIX_SPLIT,
    KV_END,
    KV_START,
    PARTIAL,
    QUERY_COUNT,
    SEQUENCE,
    TILE,
)
from nostall.serving.tables.costs import FRACTION_BITS, MAX_COST_NS
from nostall.serving.tables.cut_rules import cut_rules, tile_of
from nostall.serving.tables.prefix.forest import (
    FIRST_PREFIX_ROW,
    FOREST_COLUMNS,
    NODE_REACH,
    NODE_START,
    NODE_TOKENS,
    arrange,
    choose_nodes,
    shared_keys,
)
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from nostall.serving.tables.settings import TableSettings, TaskTables

Int64s = NDArray[np.int64]


class TokenRow(NamedTuple):
    """A row of the Token-Table (paper, section 2.3): the query tokens of a sequence or node."""

    stage: Stage
    sequence: int
    start: int
    """First row in the packed queries; of a node its first prefix row."""
    tokens: int
    kv_length: int
    shared: int
    """Of its keys, those that nodes read; of a node the keys that it reads."""
    tile: int
    """Index of the tile height."""


def token_table(batch: RaggedBatch, settings: TableSettings) -> list[TokenRow]:
    """The Token-Table of a batch: a row for each sequence that has query tokens, then those of the
    nodes of its prefix forest that are read once.
    """
    starts, stages = batch.query_starts, batch.stages
    forest = np.zeros((len(batch), FOREST_COLUMNS), np.int32)
    prefixes = SharedPrefixes.of(batch.prefix_groups, len(batch))
    arrange(batch.query_lengths, prefixes, forest)
    rules = cut_rules(settings)
    choose_nodes(prefixes, rules, forest, np.zeros(len(batch), np.int64))
    rows = [
        TokenRow(
            Stage(stages[sequence]),
            sequence,
            int(starts[sequence]),
            int(length),
            int(batch.kv_lengths[sequence]),
            int(shared_keys(sequence, forest)),
            tile_of(int(length), rules),
        )
        for sequence, length in enumerate(batch.query_lengths)
        if length
    ]
    for node, row in enumerate(forest.tolist()):
        shared, tokens = row[NODE_REACH] - row[NODE_START], row[NODE_TOKENS]
        if shared > 0:
            leader = int(prefixes.leaders[node])
            start, tile = int(forest[leader, FIRST_PREFIX_ROW]), tile_of(tokens, rules)
            rows.append(
                TokenRow(Stage.PREFIX, leader, start, tokens, row[NODE_REACH], shared, tile)
            )
    return rows


@dataclass(frozen=True)
class UnitKind:
    """Units of one stage and tile height."""

    stage: str
    height: int
    units: int
    split_units: int
    """Units that write partial results."""
    row_use: float
    """Rows of query tokens, of all rows of these tiles."""
    keys: int
    """Keys that these units read, of all KV heads."""
    cost_us: float


@dataclass(frozen=True)
class TableSummary:
    """What the task tables of a batch contain, and how even the loads of programs are."""

    order: str
    units: int
    reductions: int
    scratch_rows: int
    programs: int
    kinds: tuple[UnitKind, ...]
    cost_kind: str
    """``modelled`` or ``measured``: where the costs are from."""
    cost_source: str
    total_us: float
    """Cost of all units."""
    load_us: tuple[float, float, float]
    """Least, mean and largest cost of a program; an order without persistent programs has none."""

    @property
    def imbalance(self) -> float:
        """How much the most loaded program exceeds the mean: 0 is even."""
        _, mean, largest = self.load_us
        return largest / mean - 1 if mean else 0.0


def unit_costs(tables: TaskTables, settings: TableSettings) -> Int64s:
    """Cost of each unit in ns, by the keys that it has, shape (units,)."""
    tasks = tables.used_tasks.astype(np.int64)
    start, key = settings.unit_costs.fixed_point()
    keys = tasks[:, KV_END] - tasks[:, KV_START]
    scaled = (start[tasks[:, TILE]] + key[tasks[:, TILE]] * keys) >> FRACTION_BITS
    return np.asarray(np.clip(scaled, 1, MAX_COST_NS), np.int64)


def summarize(batch: RaggedBatch, tables: TaskTables, settings: TableSettings) -> TableSummary:
    """The summary of the tables of a batch."""
    costs = unit_costs(tables, settings)
    loads = np.diff(np.concatenate([[0], np.cumsum(costs)])[tables.used_offsets]) / 1e3
    units, reductions, scratch_rows, programs, *_ = (int(count) for count in tables.counts)
    return TableSummary(
        settings.order,
        units,
        reductions,
        scratch_rows,
        programs,
        _kinds(batch, tables, settings, costs),
        settings.unit_costs.kind,
        settings.unit_costs.source,
        float(costs.sum() / 1e3),
        (float(loads.min()), float(loads.mean()), float(loads.max())) if len(loads) else (0, 0, 0),
    )


def _kinds(
    batch: RaggedBatch, tables: TaskTables, settings: TableSettings, costs: Int64s
) -> tuple[UnitKind, ...]:
    tasks, heights = tables.used_tasks, settings.tiles.heights
    is_prefix = tasks[:, PARTIAL] <= FIRST_PREFIX_SPLIT
    stages = np.where(is_prefix, Stage.PREFIX, batch.stages[tasks[:, SEQUENCE]])
    keys = tasks[:, KV_END] - tasks[:, KV_START]
    places: Counter[tuple[int, int]] = Counter(
        zip(stages.tolist(), tasks[:, TILE].tolist(), strict=True)
    )
    kinds = []
    for (stage, tile), count in sorted(places.items()):
        chosen = (stages == stage) & (tasks[:, TILE] == tile)
        rows = int(tasks[chosen, QUERY_COUNT].sum()) * settings.group
        kinds.append(
            UnitKind(
                Stage(stage).name.lower(),
                heights[tile],
                count,
                int((tasks[chosen, PARTIAL] != -1).sum()),
                rows / (count * heights[tile]),
                int(keys[chosen].sum()),
                float(costs[chosen].sum() / 1e3),
            )
        )
    return tuple(kinds)
