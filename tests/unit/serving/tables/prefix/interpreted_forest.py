"""Compare the device's leaders, forest and tables with the host's in the interpreter; prints JSON.

Run with TRITON_INTERPRET=1:
``python -m tests.unit.serving.tables.prefix.interpreted_forest RANDOM_BATCHES``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import torch
from benchmarks.serving.host_tables import prefixes_in_pages, to_host
from tools.interpreters.triton_interpreter import prepare

from nostall.serving.tables.columns import PREFIX_ROWS, SAVED_NS
from nostall.serving.tables.costs import TileSet
from nostall.serving.tables.device import DeviceBuilder, Prefixes, Totals
from nostall.serving.tables.host import HostBuilder, needed_capacity
from nostall.serving.tables.prefix.forest import (
    DEEPEST,
    FIRST_PREFIX_ROW,
    FOREST_COLUMNS,
    NODE_PARENT,
    NODE_TOKENS,
    arrange,
)
from nostall.serving.tables.settings import TableCapacity, TableSettings
from tests.unit.serving.tables.interpreted_tables import differing
from tests.unit.serving.tables.prefix.page_tables import BY_HAND, PAGE, Pages, draw

TILES = TileSet(
    (16, 64), split=128, least_split=64, units_per_program=2, kv_align=16, least_prefix=1,
    least_saved_ns=0,
)  # fmt: skip
SETTINGS = TableSettings(8, 2, 5, TILES, order="sorted", cost_classes=2)


def different(pages: Pages, cut: str = "") -> tuple[list[str], int, int]:
    """Names of what differs; prefix rows, and the count SAVED_NS, of the host.

    ``cut``: a field of the capacity that is one too small for the prefixes of the batch.
    """
    table, queries, keys = pages.arrays
    prefixes = prefixes_in_pages(table, queries, keys, PAGE)
    exact = needed_capacity(queries, keys, SETTINGS, prefixes)
    larger = TableCapacity(*(3 * size + 40 for size in vars(exact).values()))
    if cut:
        larger = replace(larger, **{cut: getattr(exact, cut) - 1})
    host = HostBuilder.of(SETTINGS, larger).build(queries, keys, prefixes)
    builder = DeviceBuilder.of(SETTINGS, larger, "cpu", workers=1)
    # vLLM allocates the tensors in a pool whose contents its sleep discards.
    for tensor in (*builder.written, builder.state):
        tensor.random_(generator=torch.Generator().manual_seed(len(queries)))
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    built = builder.build(
        torch.from_numpy(starts),
        torch.from_numpy(keys),
        Prefixes(block_table=torch.from_numpy(table), page_size=PAGE),
    )
    device = to_host(built, larger)
    names = differing(host, device)
    names += [] if builder.queue.tolist() == [0, 0] else ["queue"]
    shared, saved_ns = int(host.counts[PREFIX_ROWS] > 0), int(host.counts[SAVED_NS])
    totals = Totals(1, shared, int(saved_ns < 0), max(saved_ns, 0))
    names += [] if builder.totals == totals else ["totals"]
    if len(queries):
        forest = np.zeros((len(queries), FOREST_COLUMNS), np.int32)
        arrange(queries, prefixes, forest)
        columns = (FIRST_PREFIX_ROW, DEEPEST, NODE_TOKENS, NODE_PARENT)
        expected = [*prefixes, *(forest[:, column] for column in columns)]
        pairs = zip(builder._forest, builder._forest._fields, expected, strict=False)
        names += [
            name
            for got, name, want in pairs
            if not np.array_equal(got.numpy()[: len(queries)], want)
        ]
    return names, int(host.counts[PREFIX_ROWS]), int(host.counts[SAVED_NS])


def main() -> None:
    prepare()
    rng = np.random.default_rng(7)
    batches = dict(BY_HAND) | {f"random {i}": draw(rng, 20) for i in range(int(sys.argv[1]))}
    results = {name: different(pages) for name, pages in batches.items()}
    cut = {
        field: different(BY_HAND["two levels"], field) for field in ("prefix_rows", "prefix_tiles")
    }
    print(json.dumps({"batches": results, "cut": cut}))


if __name__ == "__main__":
    main()
