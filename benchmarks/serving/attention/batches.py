"""Batches of the attention benchmark, and the least time that each needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nostall.serving.batch.examples import EXAMPLES, Part, make_batch, random_tree
from nostall.serving.batch.ragged import RaggedBatch

PARTS: dict[str, tuple[Part, ...]] = {
    **EXAMPLES,
    "decode-128k": (Part(1, 1, 131072),),
    "decode-few": (Part(16, 1, 4096),),
    "verify-31": (Part(4, 32, 4096, True),),
    "verify-tree": (Part(8, 16, 4096, True),),
    "reuse-2k": (Part(1, 2048, 4096),),
    "reuse-4k": (Part(1, 4096, 8192),),
    "prefill-8k": (Part(1, 8192, 8192),),
    "mixed-small": (Part(32, 1, 2048), Part(2, 512, 1024)),
}
"""Parts of each batch; ``trace-*`` batches are in ``trace_batches.json``."""
KINDS = {
    "mixed": "mixed",
    "mixed-small": "mixed",
    "trace-code": "mixed",
    "trace-conv": "mixed",
    "decode-verify": "verify",
    "verify": "verify",
    "verify-31": "verify",
    "verify-tree": "verify",
    "decode": "decode",
    "decode-128k": "decode",
    "decode-few": "decode",
    "prefill": "prefill",
    "prefill-8k": "prefill",
    "reuse-2k": "prefill",
    "reuse-4k": "prefill",
}
"""Kind of each batch; bars are set by kind."""
TRACES = Path(__file__).with_name("trace_batches.json")
FLOPS = 600e12
"""FLOP/s that bounds are computed with: FlashAttention-3's best on an H100."""
BANDWIDTHS = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes/s of the memory, by a part of the GPU's name."""


class Bound(NamedTuple):
    """The least time of a batch: the longer of its memory traffic and its arithmetic."""

    bytes: float
    flops: float
    us: float
    sum_us: float
    """Both one after the other."""


def batch(name: str, page_size: int = 16) -> RaggedBatch:
    """A batch by name."""
    if name not in PARTS:
        lengths = json.loads(TRACES.read_text())["batches"][name]
        return make_batch(lengths["query"], lengths["keys"], page_size=page_size)
    parts = [part for part in PARTS[name] for _ in range(part.sequences)]
    rng = np.random.default_rng(0)
    trees = [random_tree(part.query, rng) for part in parts] if name.endswith("-tree") else []
    return make_batch(
        [part.query for part in parts],
        [part.keys for part in parts],
        [part.speculative for part in parts],
        tree_masks=trees,
        page_size=page_size,
    )


def bound(ragged: RaggedBatch, heads: int, kv_heads: int, head_dim: int, gpu: str) -> Bound:
    """The least time of a batch with 2-byte elements on a GPU."""
    query, keys = ragged.query_lengths.astype(float), ragged.kv_lengths.astype(float)
    moved = 2 * 2 * head_dim * float((kv_heads * keys + heads * query).sum())
    pairs = float((query * (keys - query) + query * (query + 1) / 2).sum())
    flops = 4 * head_dim * heads * pairs
    rate = next((rate for part, rate in BANDWIDTHS.items() if part in gpu), BANDWIDTHS["H100"])
    memory, arithmetic = moved / rate * 1e6, flops / FLOPS * 1e6
    return Bound(moved, flops, max(memory, arithmetic), memory + arithmetic)
