"""Random batches through the kernels in Triton's interpreter; prints the largest errors as JSON.

Every value of the cache that no sequence owns is NaN, and so are the results before the launch.
Each batch runs twice, because the second launch finds the counters that the first one left.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tools.interpreters.triton_interpreter import prepare

from nostall.serving.attention.config import AttentionPlan, AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.launch import (
    FP8,
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
    Scales,
)
from nostall.serving.batch.examples import make_batch, random_tree
from nostall.serving.batch.ragged import PrefixGroup, RaggedBatch, pack_trees
from nostall.serving.tables.columns import PREFIX_ROWS, UNITS
from nostall.serving.tables.host import build_tables
from tests.unit.serving.attention.reference import exact_attention

TILES = (
    TileConfig(16, 32, 3, "all"),
    TileConfig(32, 16, 2, "branch"),
    TileConfig(64, 32, 2, "tail"),
)
SMS = 2
PLAN = AttentionPlan(KernelConfig(TILES, 4, 0, 1), split=128, least_split=64, least_prefix=64)
CASES: dict[str, tuple[AttentionShape, str, str, str]] = {
    "queue": (AttentionShape(4, 2, 64), "queue", "paired", "1/17 0/0 5/33d 40/64 1/200"),
    "ranges": (AttentionShape(4, 2, 64), "ranges", "snake", "1/16 16/16 1/1 33/161"),
    "unit": (AttentionShape(2, 2, 64), "unit", "sorted", "1/15 17/48 0/5"),
    "trees": (
        AttentionShape(4, 1, 64, has_trees=True), "queue", "sorted", "1/31 9/9d 13/141d 20/40"
    ),
    "window": (
        AttentionShape(4, 2, 64, page_size=48, window=37), "queue", "paired",
        "1/17 9/140d 40/150 1/200",
    ),
    "odd group, padded heads, soft cap": (
        AttentionShape(7, 1, 96, soft_cap=3.0), "queue", "paired", "1/65 6/64d 1/1"
    ),
    "pages of 256": (AttentionShape(2, 1, 64, page_size=256), "queue", "paired", "1/300 40/270"),
    "window of one key": (AttentionShape(2, 1, 64, window=1), "queue", "paired", "1/40 5/70"),
    "many splits": (AttentionShape(8, 1, 64), "queue", "sorted", "1/2000 3/900"),
    "long decodes": (AttentionShape(2, 1, 64), "queue", "sorted", "1/8300"),
    "shared prefixes": (
        AttentionShape(4, 2, 64, has_prefixes=True), "queue", "sorted",
        "1/300 0/290 1/17 5/200d 1/131 40/64 1/129 3/400",
    ),
    "shared prefixes, trees, odd group": (
        AttentionShape(7, 1, 96, page_size=48, has_trees=True, has_prefixes=True), "ranges",
        "snake", "1/300 2/299d 3/350d 1/200 2/210d 1/290d 30/240",
    ),
    "nested prefixes": (
        AttentionShape(4, 1, 64, has_prefixes=True), "queue", "sorted",
        "1/300 1/290 2/310 1/330 1/250 1/40 1/331 1/100",
    ),
    "decodes with nested prefixes": (
        AttentionShape(6, 2, 64, has_prefixes=True), "queue", "sorted",
        "1/300 1/290 0/310 1/330 1/250 1/40 1/331 1/100",
    ),
    "no sequence": (AttentionShape(4, 2, 64), "queue", "paired", ""),
    "no work": (AttentionShape(4, 2, 64), "queue", "paired", "0/7 0/0"),
}  # fmt: skip
"""Shape, schedule, order, and query/keys of each sequence; d: a draft that is verified."""
GROUPS: dict[str, tuple[PrefixGroup, ...]] = {
    "shared prefixes": (PrefixGroup((7, 1, 0), 272), PrefixGroup((3, 6, 4), 96)),
    "shared prefixes, trees, odd group": (
        PrefixGroup((2, 0, 1, 5), 240), PrefixGroup((3, 6, 4), 144)
    ),
    "nested prefixes": (
        PrefixGroup((0, 1, 2, 3, 4, 6), 96), PrefixGroup((0, 2, 3, 6), 160),
        PrefixGroup((3, 6, 2), 304),
    ),
    "decodes with nested prefixes": (
        PrefixGroup((0, 1, 3, 4, 6), 96), PrefixGroup((0, 3, 6), 272),
    ),
}  # fmt: skip
"""Sequences of a case that share a prefix."""


def make(name: str) -> tuple[AttentionShape, AttentionPlan, RaggedBatch]:
    """A case by name."""
    shape, schedule, order, text = CASES[name]
    sequences = [
        (*map(int, word.rstrip("d").split("/")), word.endswith("d")) for word in text.split()
    ]
    rng = np.random.default_rng(5)
    trees = [
        random_tree(query, rng) if is_draft and shape.has_trees else None
        for query, _, is_draft in sequences
    ]
    batch = make_batch(
        [query for query, _, _ in sequences],
        [keys for _, keys, _ in sequences],
        [is_draft for _, _, is_draft in sequences],
        tree_masks=trees,
        page_size=shape.page_size,
        prefix_groups=GROUPS.get(name, ()),
    )
    # As the rules do: all programs take from the front of sorted units, decodes have one tile.
    front_share = 1.0 if order == "sorted" else 0.5
    is_decode = all(query <= 1 for query, _, _ in sequences)
    tiles = TILES[:1] if is_decode and not shape.has_prefixes else TILES
    kernel = replace(PLAN.kernel, tiles=tiles, schedule=schedule, front_share=front_share)
    plan = replace(PLAN, kernel=kernel, order=order)
    return shape, plan, batch


def poisoned(batch: RaggedBatch, shape: AttentionShape, rng: np.random.Generator) -> Any:
    """A cache whose values are NaN wherever no sequence has a key it may read."""
    blocks = int(batch.block_table.max(initial=0)) + 2
    size = (blocks, batch.page_size, shape.kv_heads, shape.head_dim)
    keys, values = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    used = np.zeros(size[:2], np.bool_)
    for sequence in range(len(batch)):
        length, query = int(batch.kv_lengths[sequence]), int(batch.query_lengths[sequence])
        first = max(0, length - query - shape.window + 1) if shape.window else 0
        at = np.arange(first, length)
        used[batch.block_table[sequence, at // batch.page_size], at % batch.page_size] = True
    keys[~used] = np.nan
    values[~used] = np.nan
    return keys, values


def error(name: str, dtype: torch.dtype) -> float:
    """Largest error of a case, relative to the largest exact value; NaN if a result is NaN.

    Queries and caches in fp8 have factors, and their results are fp32.
    """
    shape, plan, batch = make(name)
    rng = np.random.default_rng(11)
    tokens = int(batch.query_lengths.sum())
    query = rng.standard_normal((tokens, shape.heads, shape.head_dim)).astype(np.float32)
    keys, values = poisoned(batch, shape, rng)
    tensors = [torch.from_numpy(array).to(dtype) for array in (query, keys, values)]
    scales = Scales(*map(torch.tensor, (0.5, 1.25, 3.0))) if dtype == FP8 else None
    stored = [tensor.double().numpy() for tensor in tensors]
    if scales is not None:
        stored = [array * float(scale) for array, scale in zip(stored, scales, strict=True)]
    exact = exact_attention(batch, shape, *stored)
    device = torch.device("cpu")
    tables = build_tables(batch, plan.table_settings(shape, SMS))
    assert bool(tables.counts[PREFIX_ROWS]) == shape.has_prefixes
    programs = plan.launched_programs(SMS, int(tables.counts[UNITS]))
    kernel = MetaAttention(shape, plan.kernel, max(programs, 1))
    on_device = AttentionBuffers.of(tables, shape.head_dim, device)
    inputs = BatchTensors.of(
        batch.query_starts, batch.kv_lengths, batch.block_table, pack_trees(batch), device
    )
    cache = PagedCache(tensors[1], tensors[2], scales)
    results = []
    for _ in range(2):
        out = torch.full_like(
            tensors[0], float("nan"), dtype=torch.float32 if dtype == FP8 else dtype
        )
        kernel(tensors[0], cache, out, inputs, on_device)
        results.append(out)
    assert torch.equal(*results), "two launches differ"
    if not tokens:
        return 0.0
    return float(np.abs(results[0].double().numpy() - exact).max() / np.abs(exact).max())


if __name__ == "__main__":
    prepare()
    chosen = sys.argv[2:] or list(CASES)
    kind = {"float32": torch.float32, "float16": torch.float16, "float8": FP8}[sys.argv[1]]
    print(json.dumps({name: error(name, kind) for name in chosen}))
