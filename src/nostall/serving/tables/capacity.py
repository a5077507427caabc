"""Table capacities that hold every batch within limits, for arrays allocated before any batch."""

from __future__ import annotations

from nostall.serving.errors import BadTables
from nostall.serving.tables.orders import find_order
from nostall.serving.tables.settings import TableCapacity, TableSettings


def bounded_capacity(
    settings: TableSettings, sequences: int, query_tokens: int, keys: int
) -> TableCapacity:
    """A capacity for all batches of at most these sequences, query tokens and keys of a sequence.

    It does not count prefix groups.

    With R keys that all query tiles see together, a ``split`` of s keys gives at most R / s units
    more than query tiles, and splitting by cost at most ``programs * units_per_program / kv_heads``
    more, of each KV head.
    """
    if min(sequences, query_tokens, keys) < 1:
        raise BadTables(
            f"limits of {sequences} sequences, {query_tokens} query tokens and {keys} keys; "
            "allowed are numbers of 1 or more"
        )
    rules, heads = settings.tiles, settings.kv_heads
    tokens = rules.tile_tokens(settings.group)
    several = [
        count
        for count, limit in zip(tokens[:-1], rules.limits[:-1], strict=True)
        if count and limit > count * settings.group
    ]
    tiles = min(sequences + query_tokens // min([*several, tokens[-1]]), query_tokens)
    visible = keys
    if settings.window:
        visible = min(keys, settings.window + max(tokens) + rules.kv_align)
    parts = settings.programs * rules.units_per_program
    more = tiles * visible // rules.split + parts // heads
    units = heads * (tiles + more)
    most_splits = -(-visible // min(rules.split, rules.least_split))
    scratch_rows = min(
        2 * more * heads * max(tokens) * settings.group,
        query_tokens * settings.heads * most_splits,
    )
    programs = settings.programs if find_order(settings.order).is_persistent else units
    reductions = heads * min(tiles, more)
    return TableCapacity(sequences, tiles, units, reductions, scratch_rows, programs)
