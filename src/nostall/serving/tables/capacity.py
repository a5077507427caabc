"""Table capacities that hold every batch within limits, for arrays allocated before any batch."""

from __future__ import annotations

from nostall.serving.errors import BadTables
from nostall.serving.tables.orders import find_order
from nostall.serving.tables.settings import TableCapacity, TableSettings


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
