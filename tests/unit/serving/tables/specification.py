"""Task tables by a slow specification in plain Python, with unbounded integers."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

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
    """The units of each program in execution order, the reductions, and the scratch rows."""

    programs: list[list[Unit]]
    reductions: list[tuple[int, ...]]
    scratch_rows: int

    @property
    def units(self) -> list[Unit]:
        return [unit for program in self.programs for unit in program]


def specify(queries: list[int], keys: list[int], settings: TableSettings) -> Tables:
    """The tables of a batch, by definition."""
    units, reductions, scratch_rows = _units(queries, keys, settings)
    return Tables(_deal(_sort(units, settings), settings), reductions, scratch_rows)


def _units(
    queries: list[int], keys: list[int], settings: TableSettings
) -> tuple[list[Unit], list[tuple[int, ...]], int]:
    group, costs = settings.group, settings.unit_costs
    cut = _query_tiles(queries, keys, settings)
    total = sum(costs.unit_ns(tile, end - first) for *_, first, end, tile in cut)
    units: list[Unit] = []
    reductions: list[tuple[int, ...]] = []
    row = 0
    for sequence, start, count, first, end, tile in cut:
        ranges = _split(first, end, tile, total, settings)
        cost = costs.unit_ns(tile, ranges[0][1] - ranges[0][0])
        heads = range(settings.kv_heads)
        is_split = len(ranges) > 1
        stride = count * group
        for split, (low, high) in enumerate(ranges):
            for head in heads:
                partial = row + (head * len(ranges) + split) * stride if is_split else -1
                units.append(Unit(sequence, start, count, low, high, head, tile, partial, cost))
        if is_split:
            for head in heads:
                first_row = row + head * len(ranges) * stride
                reductions.append((sequence, start, count, head, first_row, len(ranges)))
            row += len(heads) * len(ranges) * stride
    return units, reductions, row


def _query_tiles(
    queries: list[int], keys: list[int], settings: TableSettings
) -> list[tuple[int, ...]]:
    tiles, align = settings.tiles, settings.tiles.kv_align
    cut = []
    for sequence, (query, length) in enumerate(zip(queries, keys, strict=True)):
        if query == 0:
            continue
        tile = tiles.tile_of(query, settings.group)
        tokens = tiles.heights[tile] // settings.group
        for start in range(0, query, tokens):
            count = min(tokens, query - start)
            first_position = length - query + start
            first = max(0, first_position - settings.window + 1) if settings.window else 0
            cut.append(
                (sequence, start, count, first // align * align, first_position + count, tile)
            )
    return cut


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
