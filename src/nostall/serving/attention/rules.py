"""Plans by kind of batch: which stages and how many rows a batch has decides its plan.

The order of units and the schedule are such that one CUDA graph serves every batch of a kind: the
grid is fixed, and programs read everything else from device buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.serving.attention.config import AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.plan import AttentionPlan, default_kernel

Kind = Literal["decode", "verify", "decode and verify", "prefill", "mixed"]

DECODE = KernelConfig(
    (TileConfig(16, 64, 3),), warps=4, registers=168, programs_per_sm=3, front=1.0
)
VERIFY = KernelConfig(
    (TileConfig(16, 64, 4, "branch"), TileConfig(64, 64, 3, "branch")),
    warps=4,
    registers=0,
    programs_per_sm=2,
    front=1.0,
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
    front=1.0,
)
PLANS: dict[Kind, AttentionPlan] = {
    "decode": AttentionPlan(DECODE, "sorted"),
    "verify": AttentionPlan(VERIFY, "sorted", least_split=1024),
    "decode and verify": AttentionPlan(VERIFY, "sorted", units_per_program=1),
    "prefill": AttentionPlan(PREFILL, "sorted", units_per_program=1),
    "mixed": AttentionPlan(PREFILL, "sorted", units_per_program=2),
}
"""The plan of each kind for head dimensions up to 128; chosen by measurements on an H200.

All take units from a queue in descending cost, which the device builder knows: the longest unit is
started first, and a free program takes the next one.
"""


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


def plan_for(shape: AttentionShape, batch: BatchKind) -> AttentionPlan:
    """The plan of a batch."""
    if shape.padded_head_dim > 128:
        return AttentionPlan(default_kernel(shape))
    return PLANS[batch.kind(shape.group)]
