"""The tables of one group of layers: one set for all kinds of steps that have one plan and size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nostall.attach.vllm.grouped_tables import GroupedStepTables
from nostall.attach.vllm.routing import (
    VARIABLE,
    Choice,
    StepKind,
    plan_of,
    reads_once,
    serves,
    stored_plan,
)
from nostall.attach.vllm.step_tables import StepLimits, StepTables
from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.plan import AttentionPlan
from nostall.serving.attention.tall_launch import has_tall_kernel

MAX_SCRATCH_BYTES = 1 << 30
"""Most memory of the scratch of one group of layers."""
AnyTables = StepTables | GroupedStepTables


@dataclass(frozen=True)
class KindTables:
    """What decides the tables of a group of layers."""

    choice: Choice
    shape: AttentionShape
    limits: StepLimits
    device: Any

    def make(self, dtype: Any) -> dict[StepKind, AnyTables]:
        """Tables for each kind of step of which nostall serves the largest, with their kernels.

        Raises :class:`BadInput` if there is no such kind, and for too much scratch.
        """
        wanted = {
            kind: (plan, self.grouped_tokens(kind)) for kind, plan in self._plans(dtype).items()
        }
        made: dict[tuple[AttentionPlan, int], AnyTables] = {}
        for plan, tokens in sorted(set(wanted.values()), key=lambda key: key[1]):
            tables: AnyTables
            if tokens:
                tables = GroupedStepTables(self.shape, plan, self.limits, self.device, tokens)
            else:
                tables = StepTables(self.shape, plan, self.limits, self.device)
            made[plan, tokens] = tables
        scratch_bytes = sum(tables.scratch_bytes for tables in made.values())
        if scratch_bytes > MAX_SCRATCH_BYTES:
            raise BadInput(f"{scratch_bytes >> 20} MiB of scratch")
        for tables in made.values():
            tables.warm_up(dtype, -(-self.limits.keys // self.shape.page_size))
        return {kind: made[key] for kind, key in wanted.items()}

    def grouped_tokens(self, kind: StepKind) -> int:
        """Tokens for which tables that find shared prefixes have room; 0: tables without them."""
        if not reads_once(self.choice, kind, self.shape, self.limits.drafts > 0):
            return 0
        return self.limits.cut_tokens if self.choice.is_cut(kind) else self.limits.short_tokens

    def _plans(self, dtype: Any) -> dict[StepKind, AttentionPlan]:
        """The plan of each kind of step of which nostall serves the largest."""
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        gpu = str(torch.cuda.get_device_name(self.device))
        kinds = [
            kind
            for kind in self.choice.kinds_of(self.limits.drafts > 0)
            if serves(self.choice, kind, self.shape, self.limits.sequences, sms, gpu)
        ]
        if not kinds:
            raise BadInput(
                f"no steps of {self.shape} on {gpu} are among those that {VARIABLE} names"
            )
        has_tall = has_tall_kernel(torch.device(self.device))
        plans = {}
        for kind in kinds:
            shape = replace(self.shape, has_prefixes=self.grouped_tokens(kind) > 0)
            short = StepKind.VERIFY if self.choice.is_cut(kind) else kind
            stored = stored_plan(short, shape, str(dtype).removeprefix("torch."), gpu)
            plans[kind] = stored or plan_of(short, shape, has_tall)
        return plans
