"""The first sequences of a step through the tables of the vLLM plug-in, in Triton's interpreter.

Prints as JSON the largest error beside the exact result, the steps that had shared prefixes, and
whether the rows behind the part are as they were.
Run with TRITON_INTERPRET=1: ``python -m tests.unit.attach.vllm.interpreted_part``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from tests.unit.serving.attention.interpreted import PLAN, poisoned
from tests.unit.serving.attention.reference import exact_attention
from tools.interpreters.triton_interpreter import prepare

from nostall.attach.vllm.grouped_tables import GroupedStepTables
from nostall.attach.vllm.step_tables import StepDtypes, StepLimits
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.launch import FP8, PagedCache, Scales
from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup

SHAPE = AttentionShape(4, 2, 64)
QUERY, KEYS = (1, 1, 1, 16, 1, 5), (300, 290, 40, 288, 331, 280)
"""Decodes, and new samples whose own tokens this step computes."""
GROUPS = (PrefixGroup((0, 1, 3, 4, 5), 272), PrefixGroup((1, 4), 288))
"""The last sequence has 275 tokens of context, the fourth 272."""
REST = 70
"""Query tokens of a prompt behind the part."""


def main(stored: torch.dtype) -> None:
    prepare()
    properties = SimpleNamespace(multi_processor_count=2)
    torch.cuda.get_device_properties = lambda device: properties
    batch = make_batch(QUERY, KEYS, page_size=16, prefix_groups=GROUPS)
    rng = np.random.default_rng(3)
    count, tokens = len(QUERY), sum(QUERY)
    query = rng.standard_normal((tokens + REST, 4, 64)).astype(np.float32)
    keys, values = poisoned(batch, SHAPE, rng)
    plan = replace(
        PLAN, order="sorted", kernel=replace(PLAN.kernel, front_share=1.0), least_saved_ns=0
    )
    limits = StepLimits(count + 1, 128, 512)
    tables = GroupedStepTables(SHAPE, plan, limits, "cpu", limits.cut_tokens + tokens)
    tables._settings = replace(tables._settings, cost_classes=2)  # Fewer programs to interpret.
    width = batch.block_table.shape[1]
    tables.warm_up(StepDtypes(torch.float32, stored), width)
    # The prompt's row has the pages of the first sequence: its own tokens are in no prefix.
    table = torch.from_numpy(np.vstack([batch.block_table, batch.block_table[:1]]))
    starts = torch.tensor([*batch.query_starts, tokens + REST], dtype=torch.int32)
    lengths = torch.tensor([*KEYS, 300], dtype=torch.int32)
    part = tables.batch(starts[: count + 1], lengths[:count], table[:count])
    tables.build(part)
    out = torch.full(query.shape, float("nan"))
    inputs = [torch.from_numpy(array).to(stored) for array in (query, keys, values)]
    factors = Scales(*map(torch.tensor, (0.5, 1.25, 3.0))) if stored == FP8 else None
    tables.attend(inputs[0], PagedCache(*inputs[1:], factors), out, part)
    scales = map(float, factors or (1, 1, 1))
    real = [x.double().numpy() * scale for x, scale in zip(inputs, scales, strict=True)]
    exact = exact_attention(batch, SHAPE, real[0][:tokens], *real[1:])
    error = np.abs(out[:tokens].numpy() - exact).max() / np.abs(exact).max()
    is_left = bool(out[tokens:].isnan().all())
    print(json.dumps({"error": float(error), "shared": tables.totals.shared, "is_left": is_left}))


if __name__ == "__main__":
    main({"float32": torch.float32, "float8": FP8}[sys.argv[1]])
