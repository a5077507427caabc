"""Task tables of a device builder on the host, and the prefixes that a block table shows.

Tests and benchmarks compare the device with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.errors import CapacityExceeded
from nostall.serving.tables.columns import PROGRAMS, REDUCTIONS, SCRATCH_ROWS, UNITS
from nostall.serving.tables.costs import FRACTION_BITS
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS, cut_rules
from nostall.serving.tables.prefix.forest import FOREST_COLUMNS, NODE_TOKENS, arrange, gain_of
from nostall.serving.tables.prefix.leaders import SharedPrefixes
from nostall.serving.tables.settings import TableCapacity, TableSettings, TaskTables

Int32s = NDArray[np.int32]


def to_host(tables: Any, capacity: TableCapacity) -> TaskTables:
    """A copy of :class:`nostall.serving.tables.device.DeviceTables` on the host.

    Raises :class:`CapacityExceeded` if the batch did not fit.
    """
    fields = ("tasks", "program_offsets", "reductions", "counts", "prefix_rows")
    tensors = (getattr(tables, name).cpu().numpy() for name in fields)
    arrays = TaskTables(*(np.ascontiguousarray(array, np.int32) for array in tensors))
    check_counts(arrays.counts, capacity)
    return arrays


def check_counts(counts: Int32s, capacity: TableCapacity) -> None:
    """Raise :class:`CapacityExceeded` if the counts of a builder exceed its capacity.

    A device builder cannot raise: where a batch exceeds the capacity it writes no unit, all
    program offsets 0, and the counts that the batch needs; for too many query tiles, minus their
    number as the count of units.
    """
    if counts[UNITS] < 0:
        raise CapacityExceeded(
            f"the batch needs {-counts[UNITS]} query tiles (capacity {capacity.tiles}); allocate "
            "tables of this capacity"
        )
    needed = {
        "units": (counts[UNITS], capacity.units),
        "reductions": (counts[REDUCTIONS], capacity.reductions),
        "scratch rows": (counts[SCRATCH_ROWS], capacity.scratch_rows),
        "programs": (counts[PROGRAMS], capacity.programs),
    }
    exceeded = [
        f"{need} {name} (capacity {has})" for name, (need, has) in needed.items() if need > has
    ]
    if exceeded:
        raise CapacityExceeded(
            f"the batch needs {', '.join(exceeded)}; allocate tables of this capacity"
        )


def prefixes_in_pages(
    block_table: NDArray[Any], query_lengths: Int32s, kv_lengths: Int32s, page_size: int
) -> SharedPrefixes:
    """The prefixes that a block table shows, int32 (S, pages)."""
    pages = np.maximum(kv_lengths - query_lengths, 0) // page_size
    pages = np.minimum(np.where(query_lengths > 0, pages, 0), block_table.shape[1])
    leaders = np.full(len(pages), -1, np.int32)
    tokens = np.zeros(len(pages), np.int32)
    _find_leaders(block_table, pages, leaders, tokens)
    return SharedPrefixes(leaders, tokens * np.int32(page_size))


def groups_of(prefixes: SharedPrefixes) -> tuple[PrefixGroup, ...]:
    """The nodes of the tree as groups, in the order of the sequences that stand for them.

    Members are in ascending order, so that the leader is the first.
    """
    groups: dict[tuple[int, int], set[int]] = {}
    for leader, tokens in zip(prefixes.leaders.tolist(), prefixes.tokens.tolist(), strict=True):
        if leader >= 0:
            groups.setdefault((leader, tokens), {leader})
    for sequence in range(len(prefixes.leaders)):
        at, common = sequence, np.iinfo(np.int32).max
        while at >= 0:
            for (leader, tokens), members in groups.items():
                if leader == at and tokens <= common:
                    members.add(sequence)
            common, at = min(common, int(prefixes.tokens[at])), int(prefixes.leaders[at])
    return tuple(PrefixGroup(tuple(sorted(m)), tokens) for (_, tokens), m in groups.items())


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _find_leaders(table: Int32s, pages: Int32s, leaders: Int32s, shared: Int32s) -> None:
    """Write the leader of each sequence, and the pages that it shares with it."""
    for sequence in range(len(pages)):
        deepest = 0
        for other in range(sequence):
            most = min(pages[sequence], pages[other])
            if most <= deepest or table[other, deepest] != table[sequence, deepest]:
                continue
            common = 0
            while common < most and table[other, common] == table[sequence, common] != 0:
                common += 1
            if common > deepest:
                deepest = common
                leaders[sequence] = other
        shared[sequence] = deepest


def saved_ns(query_lengths: Int32s, group: PrefixGroup, settings: TableSettings) -> float:
    """Time of each program that reading a group's prefix once saves, by the costs of units.

    ``TileSet.least_saved_ns`` is compared with it. 0 for too few shared keys.
    """
    rules = cut_rules(settings)
    prefixes = SharedPrefixes.of((group,), len(query_lengths))
    forest = np.zeros((len(query_lengths), FOREST_COLUMNS), np.int32)
    arrange(query_lengths, prefixes, forest)
    node = int(np.argmax(forest[:, NODE_TOKENS]))
    keys = int(prefixes.tokens[node]) // rules.kv_align * rules.kv_align
    if rules.least_prefix == 0 or keys < rules.least_prefix:
        return 0.0
    saved = int(gain_of(node, prefixes, rules, forest)) * keys
    return saved * rules.kv_heads / (settings.programs << FRACTION_BITS)
