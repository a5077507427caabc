"""Hypothesis strategies: lengths of batches, and settings of tables."""

from __future__ import annotations

from hypothesis import strategies as st

from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.tables.costs import CostTable, TileSet
from nostall.serving.tables.orders import ORDERS
from nostall.serving.tables.settings import TableSettings

_BORDERS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
query_lengths = st.one_of(
    st.sampled_from(_BORDERS), st.just(1), st.integers(0, 40), st.integers(0, 700)
)
short_before = st.sampled_from((0, 1, 100, 1000))
short_queries = st.one_of(st.just(1), st.integers(0, 17))
lengths_before = st.one_of(
    st.sampled_from((*_BORDERS, 4095, 4096, 4097)), st.integers(0, 9000), st.just(30_001)
)


@st.composite
def lengths(draw: st.DrawFn, max_sequences: int = 300) -> tuple[list[int], list[int]]:
    """Query and KV lengths of 0 to ``max_sequences`` sequences."""
    pair = st.tuples(query_lengths, lengths_before)
    equal_pairs = st.tuples(
        st.tuples(short_queries, short_before), st.integers(0, max_sequences)
    ).map(lambda drawn: [drawn[0]] * drawn[1])
    pairs = draw(st.one_of(st.lists(pair, max_size=8), equal_pairs))
    return [query for query, _ in pairs], [query + before for query, before in pairs]


@st.composite
def tile_sets(draw: st.DrawFn, group: int) -> TileSet:
    heights = draw(st.sampled_from([(16, 64, 128), (16,), (64,), (16, 32, 64, 128), (128,)]))
    if heights[-1] < group:
        heights = (*heights, 128)
    align = draw(st.sampled_from([16, 64, 128]))
    return TileSet(
        heights,
        split=draw(st.sampled_from([1 << 30, 512, 2048])),
        least_split=draw(st.sampled_from([128, 512])),
        units_per_program=draw(st.sampled_from([0, 1, 4])),
        kv_align=align,
        least_prefix=draw(st.sampled_from([0, 1, 1, 64, 512])),
        least_saved_ns=draw(st.sampled_from([0, 10, 4000, 50_000])),
    )


@st.composite
def prefix_groups(draw: st.DrawFn, queries: list[int], keys: list[int]) -> tuple[PrefixGroup, ...]:
    """Groups of two or more sequences, each with fewer shared tokens than keys before a query."""
    rng = draw(st.randoms(use_true_random=False))
    free = [s for s, (query, key) in enumerate(zip(queries, keys, strict=True)) if key > query + 15]
    rng.shuffle(free)
    groups: list[PrefixGroup] = []
    while len(free) > 1 and len(groups) < 4:
        size = draw(st.integers(2, len(free)))
        members, free = free[:size], free[size:]
        groups.extend(_nested(draw, members, 0, queries, keys))
    return tuple(groups)


def _nested(
    draw: st.DrawFn, members: list[int], above: int, queries: list[int], keys: list[int]
) -> list[PrefixGroup]:
    """A group of these members that shares more than ``above`` tokens, and groups within it."""
    most = min(keys[member] - queries[member] for member in members) // 16
    if most <= above // 16:
        return []
    tokens = draw(st.integers(above // 16 + 1, most)) * 16
    groups = [PrefixGroup(tuple(members), tokens)]
    rest = members[draw(st.integers(0, 2)) :]
    while len(rest) > 1 and len(rest) < len(members) and draw(st.booleans()):
        size = draw(st.integers(2, len(rest)))
        groups += _nested(draw, rest[:size], tokens, queries, keys)
        rest = rest[size:]
    return groups


@st.composite
def grouped(
    draw: st.DrawFn, max_sequences: int = 300
) -> tuple[list[int], list[int], tuple[PrefixGroup, ...]]:
    """Query and KV lengths, and the prefix groups of a batch."""
    queries, keys = draw(lengths(max_sequences))
    groups = draw(st.one_of(st.just(()), prefix_groups(queries, keys)))
    return queries, keys, groups


@st.composite
def settings(draw: st.DrawFn, orders: tuple[str, ...] = tuple(ORDERS)) -> TableSettings:
    heads, kv_heads = draw(st.sampled_from([(32, 8), (8, 8), (7, 1), (71, 1), (6, 2)]))
    tiles = draw(tile_sets(heads // kv_heads))
    count = len(tiles.heights)
    time = st.floats(0, 5000)
    costs = draw(
        st.one_of(
            st.none(),
            st.builds(
                CostTable,
                st.tuples(*[time] * count),
                st.tuples(*[time] * count),
            ),
        )
    )
    return TableSettings(
        heads,
        kv_heads,
        draw(st.sampled_from([1, 2, 7, 132, 264])),
        tiles,
        costs,
        draw(st.sampled_from(orders)),
        draw(st.sampled_from([1, 4, 64, 256])),
        draw(st.sampled_from([0, 0, 1, 100, 4096])),
    )
