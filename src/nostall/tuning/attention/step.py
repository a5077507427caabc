"""One step of attention: a batch, its shape and dtype, and the plan that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.batch.ragged import RaggedBatch


@dataclass(frozen=True)
class AttentionStep:
    """What is launched and timed: the attention of one layer in one step."""

    ragged: RaggedBatch
    shape: AttentionShape
    plan: AttentionPlan
    dtype: str
    """``bfloat16`` or ``float16``: of queries, keys and values."""
    name: str
    """Name of the batch, for messages and records."""


def check_step(step: AttentionStep) -> None:
    """Raise :class:`BadInput` for a step whose kernels have no native search."""
    if step.plan.kernel.language == "gluon":
        raise BadInput(
            f"the plan for {step.name} is the Gluon kernel, and native schedules are searched for "
            "the Triton kernels only: warps of the Gluon kernel wait for each other's copies, and "
            "comparing results would not show a race between them; give a batch of decodes, of "
            "verifies, or of prefills beside decodes"
        )
    if not step.ragged.query_lengths.any():
        raise BadInput(f"{step.name} has no query tokens; give a batch with work to measure")
