"""Task tables by a slow specification in plain Python, with unbounded integers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.costs import FRACTION_BITS, MAX_COST_NS, TileSet
from nostall.serving.tables.settings import TableSettings


def tile_of(tiles: TileSet, query_length: int, group: int) -> int:
    """Index of the tile that a sequence takes: the first that fits, otherwise the last."""
    rows = query_length * group
    for tile, height in enumerate(tiles.heights):
        if max(group, rows) <= height:
            return tile
    return len(tiles.heights) - 1


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


class Kept(NamedTuple):
    """A node of the prefix forest that is read once."""

    members: tuple[int, ...]
    start: int
    end: int
    tile: int
    stands: int
    """The sequence that stands for it: the first member outside of its leader's branch."""


class Cut(NamedTuple):
    """A query tile."""

    sequence: int
    start: int
    count: int
    first: int
    end: int
    tile: int
    path: tuple[Kept, ...]
    """Kept nodes that read keys before ``first``, from the root on."""
    is_prefix: bool


def unit_ns(settings: TableSettings, tile: int, keys: int) -> int:
    """Cost of a unit in whole ns, from 1 to :data:`MAX_COST_NS`."""
    start, key = (int(row[tile]) for row in settings.unit_costs.fixed_point())
    return min(max((start + key * keys) >> FRACTION_BITS, 1), MAX_COST_NS)


def specify(
    queries: list[int],
    keys: list[int],
    settings: TableSettings,
    groups: Sequence[PrefixGroup] = (),
) -> Tables:
    """The tables of a batch, by definition."""
    forest = _Forest(queries, settings, groups)
    kept = sorted(forest.kept(), key=lambda node: node.stands)
    order = forest.preorder()
    cuts = _query_tiles(queries, keys, kept, order, settings)
    total = sum(unit_ns(settings, cut.tile, cut.end - cut.first) for cut in cuts)
    units: list[Unit] = []
    reductions: list[tuple[int, ...]] = []
    placed: dict[tuple[int, int], tuple[int, ...]] = {}
    row = 0
    for cut in cuts:
        row = _add_units(cut, row, total, settings, units, reductions, placed)
    starts = list(itertools.accumulate(queries, initial=0))
    prefix_rows = [
        (starts[member] + token, *placed[member, token])
        for member in order
        for token in range(queries[member])
    ]
    return Tables(
        _deal(_sort(units, settings), settings), reductions, row, prefix_rows if kept else []
    )


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
    sequence, start, count, first, end, tile, path, is_prefix = cut
    ranges = _split(first, end, tile, total, settings)
    cost = unit_ns(settings, tile, ranges[0][1] - ranges[0][0])
    before = sum(len(_split(n.start, n.end, n.tile, total, settings)) for n in path)
    heads, splits, stride = settings.kv_heads, before + len(ranges), count * settings.group
    for split, (low, high) in enumerate(ranges):
        for head in range(heads):
            partial = row + (head * splits + before + split) * stride if splits > 1 else -1
            partial = -2 - before - split if is_prefix else partial
            units.append(Unit(sequence, start, count, low, high, head, tile, partial, cost))
    if is_prefix:
        return row
    for token in range(count):
        first_row = row + token * settings.group if before else -1
        placed[sequence, start + token] = (first_row, stride, splits * stride)
    if splits == 1:
        return row
    for head in range(heads):
        reductions.append((sequence, start, count, head, row + head * splits * stride, splits))
    return row + heads * splits * stride


class _Forest:
    """The prefix forest of groups of which two are disjoint or nested."""

    def __init__(
        self, queries: list[int], settings: TableSettings, groups: Sequence[PrefixGroup]
    ) -> None:
        self.queries, self.settings = queries, settings
        self.groups = [(frozenset(group.sequences), group.tokens) for group in groups]

    def branches(self, members: frozenset[int]) -> list[frozenset[int]]:
        """The largest groups within a node, and its other members, in the order of the first."""
        inner = [group for group, _ in self.groups if group < members]
        largest = [group for group in inner if not any(group < other for other in inner)]
        single = members.difference(*largest)
        return sorted([*largest, *(frozenset({one}) for one in single)], key=min)

    def preorder(self) -> list[int]:
        """All sequences, those of each node together."""
        every = frozenset(range(len(self.queries))) | {-1, -2}  # Larger than any group.
        return [one for one in self._preorder(every) if one >= 0]

    def _preorder(self, members: frozenset[int]) -> list[int]:
        if len(members) == 1:
            return list(members)
        return [one for branch in self.branches(members) for one in self._preorder(branch)]

    def kept(self) -> list[Kept]:
        """The nodes that are read once."""
        tiles, kept = self.settings.tiles, list[Kept]()
        for members, tokens in sorted(self.groups, key=lambda group: group[1]):
            start = max((node.end for node in kept if members < set(node.members)), default=0)
            end = tokens // tiles.kv_align * tiles.kv_align
            if self._pays(members, end - start):
                tile = tile_of(tiles, self._tokens(members), self.settings.group)
                stands = min(members - self.branches(members)[0])
                kept.append(Kept(tuple(sorted(members)), start, end, tile, stands))
        return kept

    def _tokens(self, members: frozenset[int]) -> int:
        return sum(self.queries[member] for member in members)

    def _pays(self, members: frozenset[int], shared: int) -> bool:
        """Whether reading so many keys once costs less than reading them for each branch."""
        settings = self.settings
        least, (_, key) = settings.tiles.least_prefix, settings.unit_costs.fixed_point().tolist()
        if settings.window or least == 0 or shared < max(least, 1):
            return False

        def cost(query: int) -> int:
            tile = tile_of(settings.tiles, query, settings.group)
            tokens = settings.tiles.heights[tile] // settings.group
            return _ceil_div(query, tokens) * int(key[tile])

        apart = sum(cost(self._tokens(branch)) for branch in self.branches(members))
        saved = (apart - cost(self._tokens(members))) * shared
        if saved * settings.kv_heads < settings.programs * settings.tiles.least_saved_ns * 256:
            return False
        return saved > 4 * settings.group * self._tokens(members) * int(key[0])


def _query_tiles(
    queries: list[int],
    keys: list[int],
    kept: list[Kept],
    order: list[int],
    settings: TableSettings,
) -> list[Cut]:
    tiles, align = settings.tiles, settings.tiles.kv_align
    cuts = []
    for sequence, (query, length) in enumerate(zip(queries, keys, strict=True)):
        path = _path({sequence}, kept)
        tile = tile_of(tiles, query, settings.group)
        tokens = tiles.heights[tile] // settings.group
        for start in range(0, query, tokens):
            count = min(tokens, query - start)
            position = length - query + start
            first = max(0, position - settings.window + 1) if settings.window else 0
            first = path[-1].end if path else first // align * align
            cuts.append(Cut(sequence, start, count, first, position + count, tile, path, False))
    starts = itertools.accumulate(queries[s] for s in order)
    rows = {s: end - queries[s] for s, end in zip(order, starts, strict=True)}
    for node in kept:
        above = tuple(n for n in _path(set(node.members), kept) if n != node)
        total, tokens = (
            sum(queries[member] for member in node.members),
            tiles.heights[node.tile] // settings.group,
        )
        leader = node.members[0]
        for start in range(0, total, tokens):
            count = min(tokens, total - start)
            row = rows[leader] + start
            cuts.append(Cut(leader, row, count, node.start, node.end, node.tile, above, True))
    return cuts


def _path(members: set[int], kept: list[Kept]) -> tuple[Kept, ...]:
    """The kept nodes with these members, from the root on."""
    return tuple(sorted((n for n in kept if members <= set(n.members)), key=lambda n: n.start))


def _split(
    first: int, end: int, tile: int, total: int, settings: TableSettings
) -> list[tuple[int, int]]:
    """The ranges of keys of one query tile."""
    tiles, keys = settings.tiles, end - first
    splits = _ceil_div(keys, tiles.split)
    parts = settings.programs * tiles.units_per_program
    if parts:
        target = max(1, _ceil_div(total * settings.kv_heads, parts))
        by_cost = _ceil_div(unit_ns(settings, tile, keys), target)
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
