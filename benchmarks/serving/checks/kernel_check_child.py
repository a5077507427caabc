"""Child process of the kernel check: seeded ragged batches of one variant, compared with fp64."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.host_tables import prefixes_in_pages, to_host
from nostall.serving.attention.config import AttentionPlan, AttentionShape, TileConfig
from nostall.serving.attention.launch import (
    AttentionBuffers,
    BatchTensors,
    MetaAttention,
    PagedCache,
)
from nostall.serving.attention.rules import GLUON, GLUON_PLANS, PLANS
from nostall.serving.batch.examples import odd_batch, unowned_slots
from nostall.serving.batch.ragged import RaggedBatch, pack_trees
from nostall.serving.tables.columns import PREFIX_ROWS, REDUCTIONS, UNITS
from nostall.serving.tables.device import DeviceBuilder, Prefixes
from nostall.serving.tables.host import HostBuilder, build_tables
from nostall.serving.tables.settings import TableCapacity

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NO_PAGE = 1 << 28
"""Entry of the block table behind a sequence's last page; reading that page is a fault."""
GUARD = 64
"""Rows behind the result that no kernel may write."""
LIMIT = 1.1
"""Allowed error, in units of the roundings of weights and results to the inputs' dtype."""
TABLE_CAPACITY = TableCapacity(
    sequences=16,
    tiles=1024,
    units=8192,
    reductions=8192,
    scratch_rows=1 << 20,
    programs=8192,
    prefix_rows=8192,
)
"""One capacity for all batches, so that the builder is compiled once."""


@dataclass(frozen=True)
class Variant:
    """A plan of one shape."""

    plan: AttentionPlan
    shape: AttentionShape = field(default_factory=AttentionShape)
    dtype: torch.dtype = torch.bfloat16


GROUPING = replace(PLANS["decode and verify"], least_saved_ns=0)
"""A plan that reads prefixes once in small batches too."""


def _variants() -> dict[str, Variant]:
    gluon = GLUON_PLANS["prefill"]
    plans = {
        "tall": gluon,
        "tall s3": replace(gluon, kernel=replace(GLUON, tiles=(TileConfig(128, 128, 3),))),
        "tall n64": replace(gluon, kernel=replace(GLUON, tiles=(TileConfig(128, 64, 4),))),
        "tall unit": replace(gluon, kernel=replace(GLUON, schedule="unit")),
    }
    shapes = {"32/8": AttentionShape(), "28/4": AttentionShape(28, 4)}
    variants = {
        f"{name} {heads}": Variant(plan, shape)
        for name, plan in plans.items()
        for heads, shape in shapes.items()
    }
    variants |= {
        "tall page 48": Variant(gluon, AttentionShape(page_size=48)),
        "tall page 256": Variant(gluon, AttentionShape(page_size=256)),
        "tall d64": Variant(gluon, AttentionShape(head_dim=64)),
        "tall fp16": Variant(gluon, dtype=torch.float16),
    }
    for kind in ("decode", "verify", "prefill", "mixed"):
        variants[f"{kind} 32/8"] = Variant(PLANS[kind])
    for heads, shape in shapes.items():
        shared = replace(shape, has_prefixes=True)
        variants[f"prefixes {heads}"] = Variant(GROUPING, shared)
    mixed = replace(PLANS["mixed"], least_saved_ns=0)
    variants["prefixes mixed"] = Variant(mixed, AttentionShape(has_prefixes=True))
    return variants


VARIANTS = {
    **_variants(),
    "tables": Variant(PLANS["mixed"]),
    "tables+prefixes": Variant(GROUPING, AttentionShape(has_prefixes=True)),
}
"""Variants by name; ``tables`` compares the device's table builder with the host's."""


def draw_batch(rng: np.random.Generator, shape: AttentionShape, seed: int) -> RaggedBatch:
    """A batch of odd lengths, with prefix groups if the shape has them."""
    return odd_batch(rng, shape.page_size, seed=seed, has_prefixes=shape.has_prefixes)


def poisoned_cache(
    ragged: RaggedBatch, shape: AttentionShape, dtype: torch.dtype, generator: torch.Generator
) -> tuple[PagedCache, np.ndarray]:
    """Random keys and values with NaN in every slot that no sequence owns, and the block table."""
    pages = int(np.max(ragged.block_table, initial=0)) + 1
    size = (2, pages + 2, shape.page_size, shape.kv_heads, shape.head_dim)
    both = torch.randn(size, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)
    free = torch.ones(size[1:3], dtype=torch.bool)
    free[:pages] = torch.from_numpy(unowned_slots(ragged))
    width = -(-ragged.block_table.shape[1] // 16) * 16
    table = np.full((len(ragged), width), NO_PAGE, np.int32)
    for sequence, length in enumerate(ragged.kv_lengths.tolist()):
        count = -(-length // shape.page_size)
        table[sequence, :count] = ragged.block_table[sequence, :count]
    both[:, free.to(DEVICE)] = float("nan")
    return PagedCache(both[0], both[1]), table


def exact(
    ragged: RaggedBatch, shape: AttentionShape, query: Tensor, cache: PagedCache
) -> tuple[Tensor, Tensor]:
    """Attention in fp64, and the same weights over the absolute values, (tokens, heads, dim)."""
    result = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    absolute = torch.zeros_like(result)
    starts = ragged.query_starts
    for sequence, (length, keys) in enumerate(
        zip(ragged.query_lengths.tolist(), ragged.kv_lengths.tolist(), strict=True)
    ):
        if not length:
            continue
        at = np.arange(keys)
        pages = torch.from_numpy(ragged.block_table[sequence, at // shape.page_size]).long()
        index = (pages.to(DEVICE), torch.from_numpy(at % shape.page_size).to(DEVICE))
        position = torch.arange(keys - length, keys, device=DEVICE)
        hidden = torch.arange(keys, device=DEVICE)[None, :] > position[:, None]
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        for kv_head in range(shape.kv_heads):
            heads = slice(kv_head * shape.group, (kv_head + 1) * shape.group)
            key, value = (t[*index, kv_head].double() for t in (cache.keys, cache.values))
            scores = query[rows, heads].double().transpose(0, 1) @ key.T * shape.score_scale
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            result[rows, heads] = (weights @ value).transpose(0, 1)
            absolute[rows, heads] = (weights @ value.abs()).transpose(0, 1)
    return result, absolute


def check_attention(variant: Variant, seed: int) -> dict[str, Any]:
    """Run one batch; ``problem`` is empty if everything is right."""
    shape, plan = variant.shape, variant.plan
    rng = np.random.default_rng(seed)
    ragged = draw_batch(rng, shape, seed)
    queries, keys = ragged.query_lengths.tolist(), ragged.kv_lengths.tolist()
    generator = torch.Generator(DEVICE).manual_seed(seed)
    cache, table = poisoned_cache(ragged, shape, variant.dtype, generator)
    tokens = sum(queries)
    size = (tokens, shape.heads, shape.head_dim)
    query = torch.randn(size, generator=generator, device=DEVICE).to(variant.dtype)
    # Small scales spread the weights over many keys, large ones put them on few.
    query *= float(rng.choice([0.1, 1.0, 4.0]))
    plan = replace(plan, units_per_program=int(rng.choice([0, 1, 4])), least_split=256)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if HAS_GPU else 4
    sms = int(rng.choice([sms, 7]))
    settings = plan.table_settings(shape, sms)
    tables = build_tables(ragged, settings)
    buffers = AttentionBuffers.of(tables, shape.head_dim, DEVICE)
    programs = plan.launched_programs(sms, int(tables.counts[UNITS]))
    kernel = MetaAttention(shape, plan.kernel, programs, bool(tables.counts[REDUCTIONS]))
    tensors = BatchTensors.of(
        ragged.query_starts, ragged.kv_lengths, table, pack_trees(ragged), DEVICE
    )
    outs = []
    for _ in range(2):
        guarded = torch.full((tokens + GUARD, *size[1:]), 7.0, dtype=variant.dtype, device=DEVICE)
        guarded[:tokens] = float("nan")
        kernel(query, cache, guarded[:tokens], tensors, buffers)
        outs.append(guarded)
    if HAS_GPU:
        torch.cuda.synchronize()
    expected, absolute = exact(ragged, shape, query, cache)
    roundoff = torch.finfo(variant.dtype).eps / 2
    unit = roundoff * (expected.abs() + absolute) + 1e-6
    error = float(((outs[0][:tokens].double() - expected).abs() / unit).max()) if tokens else 0.0
    problems = []
    if not error < LIMIT:
        problems.append(f"error {error:.3g} of the allowed roundings")
    if not torch.equal(outs[0], outs[1]):
        problems.append("two launches differ")
    if not bool((outs[0][tokens:] == 7.0).all()):
        problems.append("wrote behind the result")
    if bool(buffers.queue.any()):
        problems.append("the queue is not empty after the launch")
    lengths = {"query": queries, "keys": keys}
    counted = {"splits": REDUCTIONS, "units": UNITS, "prefix_rows": PREFIX_ROWS}
    details = {name: int(tables.counts[column]) for name, column in counted.items()}
    return {"error": error, "problem": "; ".join(problems), **lengths, **details}


def check_tables(variant: Variant, seed: int) -> dict[str, Any]:
    """Build the tables of one batch on the device and on the host; they must be equal."""
    ragged = draw_batch(np.random.default_rng(seed), variant.shape, seed)
    # Page 0 is shared with nobody.
    pages = np.where(ragged.block_table < 0, 0, ragged.block_table + 1)
    lengths_and_page = ragged.query_lengths, ragged.kv_lengths, ragged.page_size
    prefixes = prefixes_in_pages(pages, *lengths_and_page)
    settings = variant.plan.table_settings(variant.shape, 132)
    capacity = TABLE_CAPACITY
    host = HostBuilder.of(settings, capacity).build(
        ragged.query_lengths, ragged.kv_lengths, prefixes
    )
    lengths = [torch.from_numpy(a).to(DEVICE) for a in (ragged.query_starts, ragged.kv_lengths)]
    table = torch.from_numpy(pages).to(DEVICE)
    on_device = Prefixes(block_table=table, page_size=ragged.page_size)
    builder = DeviceBuilder.of(settings, capacity, str(DEVICE))
    device = builder.build(*lengths, on_device if settings.tiles.least_prefix else None)
    device_tables = to_host(device, capacity)
    names = ("used_tasks", "used_reductions", "used_prefix_rows", "program_offsets", "counts")
    differ = [n for n in names if not np.array_equal(getattr(host, n), getattr(device_tables, n))]
    queries, keys = ragged.query_lengths.tolist(), ragged.kv_lengths.tolist()
    rows = int(host.counts[PREFIX_ROWS])
    return {"problem": ", ".join(differ), "query": queries, "keys": keys, "prefix_rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    check = check_tables if options.variant.startswith("tables") else check_attention
    with options.out.open("w") as out:
        for seed in range(options.cases):
            if time.monotonic() > end:
                break
            begin = time.monotonic()
            result = check(VARIANTS[options.variant], seed)
            result |= {"seed": seed, "seconds": round(time.monotonic() - begin, 3)}
            print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main()
