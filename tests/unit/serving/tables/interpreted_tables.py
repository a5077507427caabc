"""Compare the device builder with the host's in Triton's interpreter; prints JSON.

Run with TRITON_INTERPRET=1: ``python -m tests.unit.serving.tables.interpreted_tables [NAME ...]``;
without names, all cases are compared.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from benchmarks.serving.host_tables import prefixes_in_pages, to_host
from tools.interpreters.triton_interpreter import prepare

from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup
from nostall.serving.errors import CapacityExceeded
from nostall.serving.tables.costs import CostTable, TileSet
from nostall.serving.tables.device import DeviceBuilder, Prefixes
from nostall.serving.tables.host import HostBuilder, needed_capacity
from nostall.serving.tables.prefix.leaders import NO_PREFIXES
from nostall.serving.tables.settings import TableCapacity, TableSettings, TaskTables

LENGTHS = (0, 0, 1, 1, 1, 15, 16, 17, 33, 129, 260)
BEFORE = (0, 1, 15, 16, 63, 64, 255, 1024, 4097, 9000)


Groups = tuple[PrefixGroup, ...]


def cases() -> list[tuple[str, TableSettings, list[int], list[int], Groups]]:
    """Name, settings, query lengths, KV lengths and prefix groups."""
    measured = CostTable((900.25, 1500.5), (3.1, 14.7), "measured", "test")
    plain = TableSettings(32, 8, 132, TileSet(split=2048), cost_classes=3)
    split = replace(
        plain, programs=26, tiles=TileSet((16, 128), units_per_program=4), costs=measured
    )
    one_head = TableSettings(
        7, 1, 5, TileSet((16, 32, 64), split=512, kv_align=16), window=100, cost_classes=3
    )
    rng = np.random.default_rng(0)

    def lengths(count: int) -> tuple[list[int], list[int]]:
        query = rng.choice(LENGTHS, count)
        return query.tolist(), (query + rng.choice(BEFORE, count)).tolist()

    shared = replace(split, tiles=replace(split.tiles, least_prefix=64))
    five = (PrefixGroup((8, 2, 0), 8192), PrefixGroup((1, 3), 32), PrefixGroup((4, 6, 7, 9), 2048))
    drafts = [1, 5, 0, 2, 1, 300, 1, 16, 1, 1, 33], [9000 + 3 * place for place in range(11)]
    without: list[tuple[str, TableSettings, list[int], list[int]]] = [
        ("empty batch", plain, [], []),
        ("only empty sequences", split, [0, 0], [0, 70]),
        ("one decode of many splits", split, [1], [100_000]),
        ("300 decodes", plain, [1] * 300, [700] * 300),
        ("snake", split, *lengths(20)),
        ("snake, default classes", replace(split, cost_classes=64), *lengths(3)),
        ("snake, window", one_head, *lengths(20)),
        ("given", replace(split, order="given"), *lengths(20)),
        ("given, window", replace(one_head, order="given"), *lengths(9)),
        ("sorted", replace(plain, order="sorted"), *lengths(20)),
        ("sorted, window", replace(one_head, order="sorted"), *lengths(20)),
    ]
    grouped: list[tuple[str, TableSettings, list[int], list[int], Groups]] = [
        ("prefixes", shared, *drafts, five),
        ("prefixes, given", replace(shared, order="given"), *drafts, five),
        ("prefix of all", replace(shared, order="sorted"), [1] * 40, [3000] * 40,
         (PrefixGroup(tuple(range(40)), 2048),)),
        ("prefix of verifies", shared, [8] * 9, [4000] * 9, (PrefixGroup(tuple(range(9)), 3072),)),
    ]  # fmt: skip
    return [*((*case, ()) for case in without), *grouped]


PAGE = 32


class Batch:
    """Lengths, and a block table whose pages show the groups; page 0 is in none."""

    def __init__(self, queries: list[int], keys: list[int], groups: Groups) -> None:
        made = make_batch(queries, keys, page_size=PAGE, prefix_groups=groups)
        self.table, self.has_groups = made.block_table + 1, bool(groups)
        self.lengths = made.query_lengths, made.kv_lengths
        self.prefixes = NO_PREFIXES
        if groups:
            self.prefixes = prefixes_in_pages(self.table, *self.lengths, PAGE)

    def build_device(self, settings: TableSettings, capacity: TableCapacity) -> TaskTables:
        queries, keys = self.lengths
        builder = DeviceBuilder.of(settings, capacity, "cpu", workers=2 if len(keys) == 9 else 1)
        starts = torch.from_numpy(np.cumsum([0, *queries]).astype(np.int32))
        prefixes = Prefixes(torch.from_numpy(self.table), PAGE) if self.has_groups else None
        return to_host(builder.build(starts, torch.from_numpy(keys), prefixes), capacity)


def differing(host: TaskTables, device: TaskTables) -> list[str]:
    """Names of the arrays that differ."""
    names = ("used_tasks", "used_reductions", "used_prefix_rows", "program_offsets", "counts")
    return [n for n in names if not np.array_equal(getattr(host, n), getattr(device, n))]


def refused(name: str) -> str:
    """The error of a batch that exceeds one field of the capacity, or what happened instead."""
    tiles = TileSet(split=512, least_prefix=256)
    settings = TableSettings(32, 8, 26, tiles, order="given")
    batch = Batch([1, 100, 1], [1500, 100, 1500], (PrefixGroup((0, 2), 1024),))
    fields = vars(needed_capacity(*batch.lengths, settings, batch.prefixes))
    try:
        batch.build_device(settings, TableCapacity(**{**fields, name: fields[name] - 1}))
    except CapacityExceeded as error:
        return str(error)
    return "no error"


def main() -> None:
    prepare()
    results: dict[str, Any] = {"different": {}, "units": {}, "prefix rows": {}, "refused": {}}
    for name, settings, queries, keys, groups in cases():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        batch = Batch(queries, keys, groups)
        exact = needed_capacity(*batch.lengths, settings, batch.prefixes)
        larger = TableCapacity(*(size + 3 for size in vars(exact).values()))
        host = HostBuilder.of(settings, larger).build(*batch.lengths, batch.prefixes)
        device = batch.build_device(settings, larger)
        results["different"][name] = differing(host, device)
        results["units"][name] = len(host.used_tasks)
        results["prefix rows"][name] = len(host.used_prefix_rows)
    for name in TableCapacity.__dataclass_fields__:
        results["refused"][name] = refused(name)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
