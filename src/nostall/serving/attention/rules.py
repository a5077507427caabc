"""Plans by kind of batch: which stages and how many rows a batch has decides its plan.

The fastest schedule starts one program for each unit, and needs their number at the launch. A
launch in a CUDA graph has a fixed grid: there programs take units, in the same order, from a queue.
Measured on an H200: benchmarks/serving/results/attention.json.gz.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nostall.serving.attention.config import (
    AttentionPlan,
    AttentionShape,
    KernelConfig,
    TileConfig,
    default_kernel,
)
from nostall.serving.attention.gluon_launch import supports_gluon

Kind = Literal["decode", "verify", "decode and verify", "prefill", "mixed"]

DECODE = KernelConfig(
    (TileConfig(16, 64, 3, "branch"),), warps=4, registers=0, programs_per_sm=2, front_share=1.0
)
VERIFY = KernelConfig(
    (TileConfig(16, 64, 4, "branch"), TileConfig(64, 64, 3, "branch")),
    warps=4,
    registers=0,
    programs_per_sm=2,
    front_share=1.0,
)
PREFILL = KernelConfig(
    (
        TileConfig(16, 128, 3, "branch"),
        TileConfig(64, 64, 4, "branch"),
        TileConfig(128, 64, 4, "branch"),
    ),
    warps=8,
    registers=0,
    programs_per_sm=1,
    front_share=1.0,
)
MIXED = replace(PREFILL, tiles=(*PREFILL.tiles[:2], TileConfig(128, 64, 4, "tail")))
GLUON = KernelConfig(
    (TileConfig(128, 128, 2),), programs_per_sm=1, front_share=1.0, registers=0, language="gluon"
)
PLANS: dict[Kind, AttentionPlan] = {
    "decode": AttentionPlan(DECODE, "sorted", least_split=512, units_per_program=2),
    "verify": AttentionPlan(VERIFY, "sorted", least_split=1024),
    "decode and verify": AttentionPlan(VERIFY, "sorted", units_per_program=1),
    "prefill": AttentionPlan(PREFILL, "sorted", units_per_program=1),
    "mixed": AttentionPlan(MIXED, "sorted", units_per_program=1),
}
"""The plan of each kind for head dimensions up to 128, for launches in CUDA graphs.

Units are in descending cost, an order that the device builder knows.
"""
GLUON_PLANS: dict[Kind, AttentionPlan] = {
    "prefill": AttentionPlan(GLUON, "sorted", units_per_program=1)
}
"""Plans of the Gluon kernel, for devices that run it: 0.64 to 0.88 of the time of :data:`PLANS`."""


@dataclass(frozen=True)
class BatchKind:
    """What the host knows of a batch before its lengths."""

    has_decodes: bool
    max_query: int
    """Query tokens of the longest sequence."""
    speculative_limit: int = 32
    """Query tokens up to which a sequence is taken for a verify."""

    def kind(self, group: int) -> Kind:
        """The kind of batch, for a group of query heads that share a KV head."""
        if self.max_query <= 1 and group <= 16:
            return "decode"
        if self.max_query <= self.speculative_limit:
            return "decode and verify" if self.has_decodes else "verify"
        return "mixed" if self.has_decodes else "prefill"


def plan_for(shape: AttentionShape, batch: BatchKind, has_gluon: bool = False) -> AttentionPlan:
    """The plan of a batch, whose launch fits into a CUDA graph.

    ``has_gluon``: whether to take the Gluon kernel where it has a plan; the device must run it
    (:func:`nostall.serving.attention.gluon_launch.has_gluon_kernel`).
    """
    if shape.padded_head_dim > 128:
        return AttentionPlan(replace(default_kernel(shape), front_share=1.0), "sorted")
    kind = batch.kind(shape.group)
    if kind == "decode" and shape.has_prefixes:
        kind = "decode and verify"  # Its tile of 64 rows takes the decodes of a group together.
    plans = GLUON_PLANS if has_gluon and supports_gluon(shape) else {}
    return plans.get(kind, PLANS[kind])


MEASURED_GPU = "NVIDIA H200"
"""The GPU, as PyTorch names it, on which plans were measured beside FlashAttention-3."""
MEASURED_GROUPS = (4, 7)
"""Query heads that share a KV head in these measurements."""


def is_faster_than_fa3(
    shape: AttentionShape,
    batch: BatchKind,
    sequences: int,
    sms: int,
    gpu: str = MEASURED_GPU,
) -> bool:
    """Whether the plan of a batch took less time than FlashAttention-3 where both were measured.

    Measured (benchmarks/serving/results/attention.json.gz) in bfloat16 on one GPU, for 32 query
    heads over 8 KV heads and 28 over 4, heads of 128 elements, pages of 16 tokens, the usual scale,
    and no window, soft cap, trees or shared prefixes. There decodes, with or without verifies, are
    faster if there are enough of them that their keys need no split; verifies alone, prefills and
    mixed batches are slower. False for everything else: other GPUs (``gpu``: the name, as PyTorch
    gives it), groups, heads, pages and masks were not measured.
    """
    measured = AttentionShape(shape.heads, shape.kv_heads, 128, page_size=16)
    if gpu != MEASURED_GPU or shape != measured or shape.group not in MEASURED_GROUPS:
        return False
    if batch.kind(shape.group) not in ("decode", "decode and verify"):
        return False
    return sequences * shape.kv_heads >= 2 * sms
