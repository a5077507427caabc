"""Task tables by a slow specification in plain Python, with unbounded integers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.settings import TableSettings


class Unit(NamedTuple):
    """A row of the Task-Table, and its cost."""

    sequence: int
    start: int
    count: int
    kv_start: int
    kv_end: int
    head: int
    tile: int
    partial: int
    cost: int


class Tables(NamedTuple):
    """The units of each program in execution order, and the other tables."""

    programs: list[list[Unit]]
    reductions: list[tuple[int, ...]]
    scratch_rows: int
    prefix_rows: list[tuple[int, ...]]

    @property
    def units(self) -> list[Unit]:
        return [unit for program in self.programs for unit in program]


class Cut(NamedTuple):
    """A query tile."""

    sequence: int
    start: int
    count: int
    first: int
    end: int
    tile: int
    prefix_tile: int | None
    """Tile height of the group that reads the keys before ``first``; None: nothing is shared."""
    is_prefix: bool


def specify(
    queries: list[int],
    keys: list[int],
    settings: TableSettings,
    groups: Sequence[PrefixGroup] = (),
) -> Tables:
    """The tables of a batch, by definition."""
    paying = [group for group in groups if _pays(group, queries, settings)]
    cuts = _query_tiles(queries, keys, paying, settings)
    total = sum(settings.unit_costs.unit_ns(cut.tile, cut.end - cut.first) for cut in cuts)
    units: list[Unit] = []
    reductions: list[tuple[int, ...]] = []
    placed: dict[tuple[int, int], tuple[int, ...]] = {}
    row = 0
    for cut in cuts:
        row = _add_units(cut, row, total, settings, units, reductions, placed)
    starts = list(itertools.accumulate(queries, initial=0))
    prefix_rows = [
        (starts[member] + token, *placed[member, token])
        for group in paying
        for member in group.sequences
        for token in range(queries[member])
    ]
    return Tables(_deal(_sort(units, settings), settings), reductions, row, prefix_rows)


def _add_units(
    cut: Cut,
    row: int,
    total: int,
    settings: TableSettings,
    units: list[Unit],
    reductions: list[tuple[int, ...]],
    placed: dict[tuple[int, int], tuple[int, ...]],
) -> int:
    """Add the units of a query tile, and its reductions; returns the next scratch row."""
    sequence, start, count, first, end, tile, prefix_tile, is_prefix = cut
    ranges = _split(first, end, tile, total, settings)
    cost = settings.unit_costs.unit_ns(tile, ranges[0][1] - ranges[0][0])
    before = 0
    if prefix_tile is not None:
        before = len(_split(0, first, prefix_tile, total, settings))
    heads, splits, stride = settings.kv_heads, before + len(ranges), count * settings.group
    for split, (low, high) in enumerate(ranges):
        for head in range(heads):
            partial = row + (head * splits + before + split) * stride if splits > 1 else -1
            partial = -2 - split if is_prefix else partial
            units.append(Unit(sequence, start, count, low, high, head, tile, partial, cost))
    if is_prefix or splits == 1:
        return row
    for head in range(heads):
        reductions.append((sequence, start, count, head, row + head * splits * stride, splits))
    for token in range(count):
        first_row = row + token * settings.group
        placed[sequence, start + token] = (first_row, stride, splits * stride)
    return row + heads * splits * stride


def _pays(group: PrefixGroup, queries: list[int], settings: TableSettings) -> bool:
    """Whether reading a group's prefix once costs less than reading it for each member."""
    least, (_, key) = settings.tiles.least_prefix, settings.unit_costs.fixed_point().tolist()
    shared = _shared(group, settings)
    if settings.window or least == 0 or shared < max(least, 1):
        return False

    def cost(query: int) -> int:
        tile = settings.tiles.tile_of(query, settings.group)
        return _ceil_div(query, settings.tiles.heights[tile] // settings.group) * int(key[tile])

    members = [queries[member] for member in group.sequences]
    saved = (sum(map(cost, members)) - cost(sum(members))) * shared
    if saved * settings.kv_heads < settings.programs * settings.tiles.least_saved_ns * 256:
        return False
    return saved > 4 * settings.group * sum(members) * int(key[0])


def _shared(group: PrefixGroup, settings: TableSettings) -> int:
    return group.tokens // settings.tiles.kv_align * settings.tiles.kv_align


def _query_tiles(
    queries: list[int], keys: list[int], paying: list[PrefixGroup], settings: TableSettings
) -> list[Cut]:
    tiles, align = settings.tiles, settings.tiles.kv_align
    tiles_of_groups = {
        group: tiles.tile_of(sum(queries[member] for member in group.sequences), settings.group)
        for group in paying
    }
    group_of = {member: group for group in paying for member in group.sequences}
    cuts = []
    for sequence, (query, length) in enumerate(zip(queries, keys, strict=True)):
        group = group_of.get(sequence)
        tile = tiles.tile_of(query, settings.group)
        tokens = tiles.heights[tile] // settings.group
        for start in range(0, query, tokens):
            count = min(tokens, query - start)
            position = length - query + start
            first = max(0, position - settings.window + 1) if settings.window else 0
            first = _shared(group, settings) if group else first // align * align
            prefix_tile = tiles_of_groups[group] if group else None
            cuts.append(
                Cut(sequence, start, count, first, position + count, tile, prefix_tile, False)
            )
    row = 0
    for group, tile in tiles_of_groups.items():
        total, tokens = (
            sum(queries[member] for member in group.sequences),
            tiles.heights[tile] // settings.group,
        )
        for start in range(0, total, tokens):
            count, end = min(tokens, total - start), _shared(group, settings)
            cuts.append(Cut(group.sequences[0], row + start, count, 0, end, tile, None, True))
        row += total
    return cuts


def _split(
    first: int, end: int, tile: int, total: int, settings: TableSettings
) -> list[tuple[int, int]]:
    """The ranges of keys of one query tile."""
    tiles, keys = settings.tiles, end - first
    splits = _ceil_div(keys, tiles.split)
    parts = settings.programs * tiles.units_per_program
    if parts:
        target = max(1, _ceil_div(total * settings.kv_heads, parts))
        by_cost = _ceil_div(settings.unit_costs.unit_ns(tile, keys), target)
        splits = max(splits, min(by_cost, _ceil_div(keys, tiles.least_split)))
    if splits == 1:
        return [(first, end)]
    step = _ceil_div(_ceil_div(keys, splits), tiles.kv_align) * tiles.kv_align
    return [(low, min(low + step, end)) for low in range(first, end, step)]


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def _sort(units: list[Unit], settings: TableSettings) -> list[Unit]:
    if settings.order == "given" or not units:
        return units
    if settings.order == "lpt":
        return sorted(units, key=lambda unit: -unit.cost)
    largest = max(unit.cost for unit in units)

    def class_of(unit: Unit) -> int:
        return unit.cost * settings.cost_classes // (largest + 1)

    if settings.order == "paired":
        highest = max(unit.tile for unit in units)
        first = [unit for unit in units if unit.tile == highest]
        others = [unit for unit in units if unit.tile != highest]
        return sorted(first, key=lambda unit: -class_of(unit)) + sorted(others, key=class_of)
    return sorted(units, key=lambda unit: -class_of(unit))


def _deal(units: list[Unit], settings: TableSettings) -> list[list[Unit]]:
    if settings.order == "sorted":
        return [[unit] for unit in units]
    count = settings.programs
    if settings.order == "paired":
        ends = [program * len(units) // count for program in range(count + 1)]
        return [units[start:end] for start, end in itertools.pairwise(ends)]
    programs: list[list[Unit]] = [[] for _ in range(count)]
    loads = [(0, program) for program in range(count)]
    for rank, unit in enumerate(units):
        turn, step = divmod(rank, count)
        program = step
        if settings.order == "snake" and turn % 2:
            program = count - 1 - step
        if settings.order == "lpt":
            load, program = loads[0]
            heapq.heapreplace(loads, (load + unit.cost, program))
        programs[program].append(unit)
    return programs
